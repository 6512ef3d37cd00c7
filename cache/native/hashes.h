/* 64-bit XXH3 of ids up to 128 bytes, as specified by github.com/Cyan4973/xxHash; longer ids need its library. */
#ifndef LARDER_HASHES_H
#define LARDER_HASHES_H

#include "taken.h"

#define LONGEST 128
#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME_MX1 0x165667919E3779F9u
#define PRIME_MX2 0x9FB21C651E98DF25u

static const unsigned char secret[136] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3,
};

static inline uint64_t read64(const void *at) { return *(const any_u64 *)at; }
static inline uint32_t read32(const void *at) { return *(const any_u32 *)at; }
static inline uint64_t turned(uint64_t x, int by) { return x << by | x >> (64 - by); }

static inline uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t avalanche(uint64_t hash) {
    hash ^= hash >> 37;
    hash *= PRIME_MX1;
    return hash ^ hash >> 32;
}

static inline uint64_t avalanche64(uint64_t hash) {
    hash ^= hash >> 33;
    hash *= PRIME64_2;
    hash ^= hash >> 29;
    hash *= PRIME64_3;
    return hash ^ hash >> 32;
}

static inline uint64_t mixed(const unsigned char *at, const unsigned char *key, uint64_t seed) {
    return folded(read64(at) ^ (read64(key) + seed), read64(at + 8) ^ (read64(key + 8) - seed));
}

static uint64_t short_hash(const unsigned char *at, size_t size, uint64_t seed) {
    if (size > 8) {
        uint64_t low = read64(at) ^ ((read64(secret + 24) ^ read64(secret + 32)) + seed);
        uint64_t high = read64(at + size - 8) ^ ((read64(secret + 40) ^ read64(secret + 48)) - seed);
        return avalanche(size + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (size >= 4) {
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t both = read32(at + size - 4) + ((uint64_t)read32(at) << 32);
        uint64_t hash = both ^ ((read64(secret + 8) ^ read64(secret + 16)) - seed);
        hash ^= turned(hash, 49) ^ turned(hash, 24);
        hash *= PRIME_MX2;
        hash ^= (hash >> 35) + size;
        hash *= PRIME_MX2;
        return hash ^ hash >> 28;
    }
    if (size) {
        uint32_t all = (uint32_t)at[0] << 16 | (uint32_t)at[size >> 1] << 24 | at[size - 1] | (uint32_t)size << 8;
        return avalanche64(all ^ ((read32(secret) ^ read32(secret + 4)) + seed));
    }
    return avalanche64(seed ^ read64(secret + 56) ^ read64(secret + 64));
}

static uint64_t hash_of(const unsigned char *at, size_t size, uint64_t seed) {
    if (size <= 16) return short_hash(at, size, seed);
    uint64_t hash = size * PRIME64_1;
    for (size_t pairs = (size - 1) / 32, i = 0; i <= pairs; i++) {
        hash += mixed(at + 16 * i, secret + 32 * i, seed);
        hash += mixed(at + size - 16 * (i + 1), secret + 32 * i + 16, seed);
    }
    return avalanche(hash);
}

/* Return the uint64 hash of each of a list of bytes; None if one is longer than this code supports. */
static PyObject *hashes(PyObject *module, PyObject *args) {
    PyObject *ids, *found;
    unsigned long long seed;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!K", &PyList_Type, &ids, &seed)) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(ids);
    if (!(found = PyByteArray_FromStringAndSize(NULL, count * 8))) return NULL;
    any_u64 *out = (any_u64 *)PyByteArray_AS_STRING(found);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *each = PyList_GET_ITEM(ids, i);
        if (!PyBytes_Check(each) || PyBytes_GET_SIZE(each) > LONGEST) {
            Py_DECREF(found);
            Py_RETURN_NONE;
        }
        out[i] = hash_of((unsigned char *)PyBytes_AS_STRING(each), (size_t)PyBytes_GET_SIZE(each), seed);
    }
    return found;
}

/* Return the uint64 hash of each text between int32 cuts; None unless these ascend within the data and no text is too
   long. */
static PyObject *text_hashes(PyObject *module, PyObject *args) {
    PyObject *sent, *sent_cuts, *found = NULL;
    unsigned long long seed;
    taken given = {0}, ends = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOK", &sent, &sent_cuts, &seed)) return NULL;
    if (!take(sent, &given) || !take(sent_cuts, &ends)) goto end;
    const unsigned char *data = given.view.buf;
    const any_i32 *cuts = ends.view.buf;
    Py_ssize_t count = ends.view.len / 4 - 1;
    int is_sound = count >= 0 && cuts[0] >= 0 && cuts[count] <= given.view.len;
    if (is_sound && !(found = PyByteArray_FromStringAndSize(NULL, count * 8))) goto end;
    any_u64 *out = is_sound ? (any_u64 *)PyByteArray_AS_STRING(found) : NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; is_sound && i < count; i++) {
        is_sound = cuts[i] <= cuts[i + 1] && cuts[i + 1] - cuts[i] <= LONGEST && cuts[i + 1] <= given.view.len;
        if (is_sound) out[i] = hash_of(data + cuts[i], (size_t)(cuts[i + 1] - cuts[i]), seed);
    }
    Py_END_ALLOW_THREADS
    if (!is_sound) Py_XSETREF(found, Py_NewRef(Py_None));
end:
    give(&given);
    give(&ends);
    return found;
}

#endif
