/* Buffers that Python exports for the duration of one call, and unaligned numbers in them. */
#ifndef LARDER_TAKEN_H
#define LARDER_TAKEN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "records are little-endian"
#endif

typedef uint16_t __attribute__((aligned(1), may_alias)) any_u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) any_u32;
typedef int32_t __attribute__((aligned(1), may_alias)) any_i32;
typedef uint64_t __attribute__((aligned(1), may_alias)) any_u64;
typedef int64_t __attribute__((aligned(1), may_alias)) any_i64;
typedef float __attribute__((aligned(1), may_alias)) any_f32;

typedef struct {
    Py_buffer view;
    int is_taken;
} taken;

/* Return 1, or 0 with an exception set. */
static int take(PyObject *from, taken *to) {
    to->is_taken = PyObject_GetBuffer(from, &to->view, PyBUF_SIMPLE) == 0;
    return to->is_taken;
}

static void give(taken *each) {
    if (each->is_taken) PyBuffer_Release(&each->view);
    each->is_taken = 0;
}

static PyObject *wrong(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return NULL;
}

#endif
