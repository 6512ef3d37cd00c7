/* Stored records in memory: which of them can be rendered without decoding, and their numbers. */
#ifndef LARDER_ROWS_H
#define LARDER_ROWS_H

#include "taken.h"

/* Must equal cache/records.py: the loader compares these with the values that `columns.c` exports. */
#define HEADER 16
#define FINGERPRINT_AT 0
#define COUNT_AT 12
#define FLAGS_AT 14
#define EXPONENT_AT 15
#define FORMAT_SHIFT 4

/* Layout of records with `width` numbers of 2 or 4 bytes each; in lists as many ordinals precede the numbers. */
typedef struct {
    taken lent;
    const char *data;
    Py_ssize_t count, size, numbers_at;
    Py_ssize_t width;
    int is_list, is_half;
} records;

static int take_records(PyObject *from, Py_ssize_t width, int is_list, int is_half, records *to) {
    if (width < 1 || width > 65535) return wrong("a record has 1 to 65535 numbers"), 0;
    if (!take(from, &to->lent)) return 0;
    to->width = width;
    to->is_list = is_list;
    to->is_half = is_half;
    to->numbers_at = HEADER + (is_list ? 4 * width : 0);
    to->size = to->numbers_at + width * (is_half ? 2 : 4);
    to->data = to->lent.view.buf;
    to->count = to->lent.view.len / to->size;
    if (to->lent.view.len % to->size) return wrong("records of another size"), 0;
    return 1;
}

static int is_finite(const records *all, const char *record) {
    if (all->is_half) {
        const any_u16 *numbers = (const any_u16 *)(record + all->numbers_at);
        uint16_t most = 0;
        for (Py_ssize_t i = 0; i < all->width; i++) {
            uint16_t bits = numbers[i] & 0x7C00;
            most = bits > most ? bits : most;
        }
        return most != 0x7C00;
    }
    const any_i32 *numbers = (const any_i32 *)(record + all->numbers_at);
    int32_t most = 0;
    for (Py_ssize_t i = 0; i < all->width; i++) {
        int32_t bits = numbers[i] & 0x7F800000;
        most = bits > most ? bits : most;
    }
    return most != 0x7F800000;
}

static int are_listable(const char *record, unsigned used, uint32_t items) {
    const any_u32 *ordinals = (const any_u32 *)(record + HEADER);
    uint32_t bad = 0;
    for (unsigned i = 0; i < used; i++) bad |= ordinals[i] >= items;
    return !bad;
}

/* Return one byte per record: 1 if its `flags` bits in `mask` match, it has at least `least` numbers, all finite, an
   exponent of at most `safe`, and no ordinal beyond `items`. */
static PyObject *plain_record_mask(PyObject *module, PyObject *args) {
    PyObject *sent, *found = NULL;
    Py_ssize_t width;
    int is_list, is_half, mask, flags, safe;
    unsigned int least, items;
    records all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OnppiiIiI", &sent, &width, &is_list, &is_half, &mask, &flags, &least,
                          &safe, &items))
        return NULL;
    if (!take_records(sent, width, is_list, is_half, &all)) goto end;
    found = PyBytes_FromStringAndSize(NULL, all.count);
    for (Py_ssize_t i = 0; found && i < all.count; i++) {
        const char *record = all.data + i * all.size;
        unsigned used = *(const any_u16 *)(record + COUNT_AT);
        PyBytes_AS_STRING(found)[i] =
            ((unsigned char)record[FLAGS_AT] & mask) == flags && used >= least && used <= width &&
            (!is_half || (signed char)record[EXPONENT_AT] <= safe) && is_finite(&all, record) &&
            (!is_list || are_listable(record, used, items));
    }
end:
    give(&all.lent);
    return found;
}

/* 2 ** power, equal to numpy's ldexp, for any power that fits a signed byte. */
static float power_of(int power) {
    uint32_t bits = power > -127 ? (uint32_t)(power + 127) << 23 : 1u << (power + 149);
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Convert a finite float16 without using subnormal float32 numbers, which the processor may be set to flush to zero. */
static float half(uint16_t bits) {
    uint32_t size = bits & 0x7FFF, whole;
    float found;
    if (size < 0x0400) found = (float)size * 0x1p-24f;
    else {
        whole = (size << 13) + (112u << 23);
        memcpy(&found, &whole, sizeof found);
    }
    return bits & 0x8000 ? -found : found;
}

/* Write the first `k` numbers of a plain record. */
static void numbers_of(const records *all, Py_ssize_t row, Py_ssize_t k, any_f32 *to) {
    const char *record = all->data + row * all->size, *numbers = record + all->numbers_at;
    if (!all->is_half) {
        memcpy(to, numbers, (size_t)k * 4);
        return;
    }
    float power = power_of((signed char)record[EXPONENT_AT]);
    for (Py_ssize_t i = 0; i < k; i++) to[i] = half(((const any_u16 *)numbers)[i]) * power;
}

/* Return float32[n * k] as bytes. */
static PyObject *numbers(PyObject *module, PyObject *args) {
    PyObject *sent, *found = NULL;
    Py_ssize_t width, k;
    int is_list, is_half;
    records all = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "Onppn", &sent, &width, &is_list, &is_half, &k)) return NULL;
    if (!take_records(sent, width, is_list, is_half, &all)) goto end;
    if (k < 1 || k > width) {
        wrong("so many numbers no record has");
        goto end;
    }
    found = PyBytes_FromStringAndSize(NULL, all.count * k * 4);
    for (Py_ssize_t i = 0; found && i < all.count; i++)
        numbers_of(&all, i, k, (any_f32 *)PyBytes_AS_STRING(found) + i * k);
end:
    give(&all.lent);
    return found;
}

#endif
