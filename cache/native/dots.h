/* Products of one vector with chosen rows of a matrix, which are read in place: gathering would read them twice. */
#ifndef LARDER_DOTS_H
#define LARDER_DOTS_H

#include "products.h"
#include "taken.h"

#define AHEAD 4 /* number of rows to prefetch while one is multiplied */

static void prefetch_row(const any_f32 *row, Py_ssize_t dims) {
    for (Py_ssize_t i = 0; i < dims && i < 512; i += 16) __builtin_prefetch(row + i);
}

/* Return products, float32 as bytes, of `vector` [dims] and rows `ordinals` (int64) of `matrix` [any number, dims]. */
static PyObject *dots(PyObject *module, PyObject *args) {
    PyObject *sent[3], *out = NULL;
    taken vector = {0}, matrix = {0}, chosen = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &sent[0], &sent[1], &sent[2])) return NULL;
    if (!take(sent[0], &vector) || !take(sent[1], &matrix) || !take(sent[2], &chosen)) goto end;
    Py_ssize_t dims = vector.view.len / 4, count = chosen.view.len / 8;
    Py_ssize_t rows = dims ? matrix.view.len / 4 / dims : 0;
    const any_i64 *ordinals = chosen.view.buf;
    const any_f32 *one = vector.view.buf, *all = matrix.view.buf;
    for (Py_ssize_t i = 0; i < count; i++)
        if (ordinals[i] < 0 || ordinals[i] >= rows) {
            wrong("a row that the matrix does not have");
            goto end;
        }
    out = PyBytes_FromStringAndSize(NULL, count * 4);
    if (!out) goto end;
    any_f32 *found = (any_f32 *)PyBytes_AS_STRING(out);
    Py_BEGIN_ALLOW_THREADS;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + AHEAD < count) prefetch_row(all + ordinals[i + AHEAD] * dims, dims);
        found[i] = near_dot((const float *)one, (const float *)(all + ordinals[i] * dims), (size_t)dims);
    }
    Py_END_ALLOW_THREADS;
end:
    give(&vector);
    give(&matrix);
    give(&chosen);
    return out;
}

#endif
