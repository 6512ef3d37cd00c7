/* Lists of items: their ids as an Arrow column, and complete answers as JSON. */
#ifndef LARDER_LISTS_H
#define LARDER_LISTS_H

#include "rows.h"

/* Ids of a catalogue: their bytes, and uint64 offsets, one more than there are ids. */
typedef struct {
    taken bytes, offsets;
    const char *data;
    const any_u64 *cuts;
    uint64_t count, size;
} catalogue;

static int take_catalogue(PyObject *bytes, PyObject *offsets, catalogue *to) {
    if (!take(bytes, &to->bytes) || !take(offsets, &to->offsets)) return 0;
    to->data = to->bytes.view.buf;
    to->size = (uint64_t)to->bytes.view.len;
    to->cuts = to->offsets.view.buf;
    if (to->offsets.view.len < 8) return wrong("a catalogue lacks offsets"), 0;
    to->count = (uint64_t)to->offsets.view.len / 8 - 1;
    return 1;
}

static void give_catalogue(catalogue *from) {
    give(&from->bytes);
    give(&from->offsets);
}

/* Size of an item's id in bytes, and its position; -1 if there is no such item. */
static int64_t id_of(const catalogue *from, uint32_t ordinal, const char **at) {
    if (ordinal >= from->count) return -1;
    uint64_t start = from->cuts[ordinal], end = from->cuts[ordinal + 1];
    if (start > end || end > from->size || end - start > INT32_MAX) return -1;
    *at = from->data + start;
    return (int64_t)(end - start);
}

static const any_u32 *items_of(const records *all, Py_ssize_t row) {
    return (const any_u32 *)(all->data + row * all->size + HEADER);
}

/* Return (concatenated ids of the first `k` items of each record, int32 cuts: one more than ids). */
static PyObject *names(PyObject *module, PyObject *args) {
    PyObject *sent, *ids, *offsets, *cuts = NULL, *data = NULL, *both = NULL;
    Py_ssize_t width, k;
    int is_half;
    records all = {0};
    catalogue items = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OnpnOO", &sent, &width, &is_half, &k, &ids, &offsets)) return NULL;
    if (!take_records(sent, width, 1, is_half, &all)) goto end;
    if (!take_catalogue(ids, offsets, &items)) goto end;
    if (k < 1 || k > width) {
        wrong("so many items no record has");
        goto end;
    }
    Py_ssize_t count = all.count * k;
    if (!(cuts = PyBytes_FromStringAndSize(NULL, 4 * (count + 1)))) goto end;
    any_i32 *cut = (any_i32 *)PyBytes_AS_STRING(cuts);
    int64_t total = 0;
    const char *id = NULL;
    *cut++ = 0;
    for (Py_ssize_t row = 0; row < all.count; row++)
        for (Py_ssize_t i = 0; i < k; i++) {
            int64_t size = id_of(&items, items_of(&all, row)[i], &id);
            if (size < 0 || (total += size) > INT32_MAX) {
                wrong("an item that the catalogue does not have");
                goto end;
            }
            *cut++ = (int32_t)total;
        }
    if (!(data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total))) goto end;
    char *to = PyBytes_AS_STRING(data), *last = to + total;
    for (Py_ssize_t row = 0; row < all.count; row++)
        for (Py_ssize_t i = 0; i < k; i++) {
            int64_t size = id_of(&items, items_of(&all, row)[i], &id);
            if (size < 0 || size > last - to) { /* the file changed during the call */
                wrong("an item that the catalogue does not have");
                goto end;
            }
            memcpy(to, id, (size_t)size);
            to += size;
        }
    both = PyTuple_Pack(2, data, cuts);
end:
    Py_XDECREF(data);
    Py_XDECREF(cuts);
    give(&all.lent);
    give_catalogue(&items);
    return both;
}

#define NUMERAL 16 /* one byte for the text's length (0: not written yet), then the text */
#define DROPPED 13 /* low bits of a float32 that are 0 in a float16 times a power of two */

/* The text of a number: NULL if one of the dropped bits is set; empty if it was not written yet. */
static const char *numeral_of(const char *numerals, float number, uint32_t *key) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    if (bits & ((1u << DROPPED) - 1)) return NULL;
    *key = bits >> DROPPED;
    const char *found = numerals + (size_t)*key * NUMERAL;
    return (unsigned char)*found < NUMERAL ? found : NULL;
}

static int is_plain_text(const char *text, int64_t size) {
    unsigned bad = 0;
    for (int64_t i = 0; i < size; i++)
        bad |= (unsigned char)text[i] < 0x20 || text[i] == '"' || text[i] == '\\';
    return !bad;
}

/* Write `"id","id",...`, at most `room` bytes; NULL if an id needs escapes. */
static char *json_items(const catalogue *items, const any_u32 *ordinals, Py_ssize_t k, char *to, int64_t room) {
    for (Py_ssize_t i = 0; i < k; i++) {
        const char *id = NULL;
        int64_t size = id_of(items, ordinals[i], &id);
        if (size < 0 || (room -= size + 3) < 0 || !is_plain_text(id, size)) return NULL;
        *to++ = '"';
        memcpy(to, id, (size_t)size);
        to += size;
        *to++ = '"';
        *to++ = ',';
    }
    return to - 1;
}

#endif
