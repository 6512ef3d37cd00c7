/* Sorted hashes of an entity set, in parts: many are searched in lockstep, so that their cache misses overlap. */
#ifndef LARDER_PARTS_H
#define LARDER_PARTS_H

#include "taken.h"

typedef struct {
    PyObject_HEAD
    Py_ssize_t count;
    taken *parts;
    uint64_t *firsts;
    int64_t *starts; /* count + 1 */
} parts_object;

static void parts_dealloc(parts_object *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; self->parts && i < self->count; i++) give(&self->parts[i]);
    PyMem_Free(self->parts);
    PyMem_Free(self->firsts);
    PyMem_Free(self->starts);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int parts_fill(parts_object *self, PyObject *firsts, PyObject *parts) {
    Py_ssize_t count = PyTuple_GET_SIZE(parts);
    if (PyTuple_GET_SIZE(firsts) != count || !count) return wrong("one first hash per part"), 0;
    self->parts = PyMem_Calloc((size_t)count, sizeof(taken));
    self->firsts = PyMem_Calloc((size_t)count, sizeof(uint64_t));
    self->starts = PyMem_Calloc((size_t)count + 1, sizeof(int64_t));
    self->count = count;
    if (!self->parts || !self->firsts || !self->starts) return PyErr_NoMemory(), 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!take(PyTuple_GET_ITEM(parts, i), &self->parts[i])) return 0;
        self->firsts[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(firsts, i));
        if (PyErr_Occurred()) return 0;
        self->starts[i + 1] = self->starts[i] + self->parts[i].view.len / 8;
    }
    return 1;
}

static PyObject *parts_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *firsts, *parts;
    (void)named;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &firsts, &PyTuple_Type, &parts)) return NULL;
    parts_object *self = (parts_object *)type->tp_alloc(type, 0);
    if (self && !parts_fill(self, firsts, parts)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Find the part whose range contains the hash; a hash before the first part is searched in the first. */
static Py_ssize_t part_of(const parts_object *self, uint64_t hash) {
    Py_ssize_t low = 1, high = self->count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        if (self->firsts[middle] <= hash) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

typedef struct {
    const any_u64 *base;
    int64_t left;
    Py_ssize_t part;
} search;

#define TOGETHER 128
#define ALONE 2048 /* from this number of hashes on, search without the GIL */

static void find_some(const parts_object *self, const any_u64 *wanted, Py_ssize_t count, any_i64 *out) {
    search all[TOGETHER];
    int64_t longest = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        search *each = &all[i];
        each->part = part_of(self, wanted[i]);
        each->base = self->parts[each->part].view.buf;
        each->left = self->parts[each->part].view.len / 8;
        if (each->left > longest) longest = each->left;
    }
    for (int64_t width = longest; width > 1; width -= width / 2)
        for (Py_ssize_t i = 0; i < count; i++) {
            int64_t half = all[i].left / 2;
            all[i].base += half && all[i].base[half - 1] < wanted[i] ? half : 0;
            all[i].left -= half;
        }
    for (Py_ssize_t i = 0; i < count; i++) {
        const taken *part = &self->parts[all[i].part];
        int64_t place = all[i].base - (const any_u64 *)part->view.buf;
        int is_there = all[i].left && *all[i].base == wanted[i];
        out[i] = is_there ? self->starts[all[i].part] + place : -1;
    }
}

/* Return int64 positions of uint64 hashes, -1 for an absent one. */
static PyObject *parts_find(parts_object *self, PyObject *hashes) {
    taken given = {0};
    if (!take(hashes, &given)) return NULL;
    Py_ssize_t count = given.view.len / 8;
    PyObject *found = PyByteArray_FromStringAndSize(NULL, count * 8);
    any_i64 *out = found ? (any_i64 *)PyByteArray_AS_STRING(found) : NULL;
    /* The output is private and the input buffers stay exported, so the GIL may be released for many hashes. */
    PyThreadState *state = found && count > ALONE ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t at = 0; found && at < count; at += TOGETHER) {
        Py_ssize_t some = count - at < TOGETHER ? count - at : TOGETHER;
        find_some(self, (const any_u64 *)given.view.buf + at, some, out + at);
    }
    if (state) PyEval_RestoreThread(state);
    give(&given);
    return found;
}

/* Return (int64 pages, int64 offsets) of int64 positions. Arguments: positions, first page of each part, records per
   page, bytes per record. */
static PyObject *parts_locate(parts_object *self, PyObject *args) {
    PyObject *sent, *sent_pages, *pages = NULL, *offsets = NULL, *both = NULL;
    long long per_page, size;
    taken given = {0}, firsts = {0};
    if (!PyArg_ParseTuple(args, "OOLL", &sent, &sent_pages, &per_page, &size)) return NULL;
    if (per_page < 1 || size < 1) return wrong("a page holds at least one record");
    if (!take(sent, &given) || !take(sent_pages, &firsts)) goto end;
    Py_ssize_t count = given.view.len / 8, part = 0;
    const any_i64 *positions = given.view.buf, *first_pages = firsts.view.buf;
    if (firsts.view.len / 8 != self->count) {
        wrong("one first page per part");
        goto end;
    }
    pages = PyBytes_FromStringAndSize(NULL, count * 8);
    offsets = PyBytes_FromStringAndSize(NULL, count * 8);
    if (!pages || !offsets) goto end;
    any_i64 *page = (any_i64 *)PyBytes_AS_STRING(pages);
    any_i64 *offset = (any_i64 *)PyBytes_AS_STRING(offsets);
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t at = positions[i];
        if (at < 0 || at >= self->starts[self->count]) {
            wrong("a position that no part has");
            goto end;
        }
        if (at < self->starts[part]) part = 0;
        while (at >= self->starts[part + 1]) part++;
        at -= self->starts[part];
        int64_t page_number, byte_offset;
        if (__builtin_add_overflow(at / per_page, first_pages[part], &page_number) ||
            __builtin_mul_overflow(at % per_page, size, &byte_offset)) {
            wrong("a page number or an offset does not fit 64 bits");
            goto end;
        }
        page[i] = page_number;
        offset[i] = byte_offset;
    }
    both = PyTuple_Pack(2, pages, offsets);
end:
    Py_XDECREF(pages);
    Py_XDECREF(offsets);
    give(&given);
    give(&firsts);
    return both;
}

#endif
