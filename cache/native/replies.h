/* Replies of equal length in the bytes received from a socket, which are untrusted: see cache/l2/commands.py. */
#ifndef LARDER_REPLIES_H
#define LARDER_REPLIES_H

#include "requests.h"
#include "rows.h"

/* Write `$<length>\r\n`; return its size in bytes. */
static Py_ssize_t head_of(uint64_t length, char *to) {
    *to = '$';
    int digits = digits_of(length, to + 1);
    memcpy(to + 1 + digits, "\r\n", 2);
    return digits + 3;
}

/* Whether the data starts with, or is a prefix of, `count` bulk strings of `length` bytes. */
static PyObject *could_be(PyObject *module, PyObject *args) {
    const char *data;
    Py_ssize_t size, count, length;
    char head[DIGITS_MAX + 3];
    (void)module;
    if (!PyArg_ParseTuple(args, "y#nn", &data, &size, &count, &length)) return NULL;
    if (count < 0 || length < 0 || length > PY_SSIZE_T_MAX / 4) return wrong("no such replies");
    Py_ssize_t before = head_of((uint64_t)length, head), step = before + length + 2;
    Py_ssize_t whole = size / step < count ? size / step : count;
    for (Py_ssize_t i = 0; i < whole; i++, data += step, size -= step)
        if (memcmp(data, head, (size_t)before) || memcmp(data + before + length, "\r\n", 2)) Py_RETURN_FALSE;
    if (whole == count) Py_RETURN_TRUE;
    /* A reply of another length is detected by its first bytes, without waiting for more. */
    return PyBool_FromLong(!memcmp(data, head, (size_t)(size < before ? size : before)));
}

/* Return (copy of `count` records of `size` bytes at `first` and every `step` bytes from there, number of records with
   `format` and their expected uint64 fingerprint). */
static PyObject *records_of(PyObject *module, PyObject *args) {
    const char *data;
    Py_ssize_t room, first, step, count, size, sound = 0;
    PyObject *sent, *copy = NULL, *both = NULL;
    int format;
    taken prints = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y#nnnnOi", &data, &room, &first, &step, &count, &size, &sent, &format)) return NULL;
    if (!take(sent, &prints)) return NULL;
    if (count < 0 || first < 0 || size < HEADER || step < size || first > room || prints.view.len % 8 || prints.view.len / 8 != count ||
        (count && ((room - first - size) < 0 || (room - first - size) / step < count - 1))) {
        wrong("replies reach beyond what came");
        goto end;
    }
    if (!(copy = PyByteArray_FromStringAndSize(NULL, count * size))) goto end;
    const any_u64 *wanted = prints.view.buf;
    char *to = PyByteArray_AS_STRING(copy);
    for (Py_ssize_t i = 0; i < count; i++, to += size) {
        const char *from = data + first + i * step;
        memcpy(to, from, (size_t)size);
        sound += *(const any_u64 *)(from + FINGERPRINT_AT) == wanted[i] && (unsigned char)from[FLAGS_AT] >> FORMAT_SHIFT == format;
    }
    both = Py_BuildValue("(On)", copy, sound);
end:
    Py_XDECREF(copy);
    give(&prints);
    return both;
}

/* Whether a list of indexes is 0, 1, ... up to `count`, so that every record is written. */
static int are_all_places(PyObject *places, Py_ssize_t count) {
    if (PyList_GET_SIZE(places) != count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (PyLong_AsSsize_t(PyList_GET_ITEM(places, i)) != i) return PyErr_Clear(), 0;
    return 1;
}

/* Return `count` records of `size` bytes: `rows` at a list of indexes, others at their keys in a dictionary, else
   zeros. */
static PyObject *spread(PyObject *module, PyObject *args) {
    Py_ssize_t count, size, next = 0;
    PyObject *sent, *places, *others, *place, *record, *whole = NULL;
    taken rows = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "nnOO!O!", &count, &size, &sent, &PyList_Type, &places, &PyDict_Type, &others))
        return NULL;
    if (count < 0 || size < 1 || count > PY_SSIZE_T_MAX / size) return wrong("so many records are too many");
    if (!take(sent, &rows)) return NULL;
    if (rows.view.len / size < PyList_GET_SIZE(places)) {
        wrong("a record per place");
        goto end;
    }
    if (!(whole = PyByteArray_FromStringAndSize(NULL, count * size))) goto end;
    char *to = PyByteArray_AS_STRING(whole);
    const char *from = rows.view.buf;
    if (!are_all_places(places, count)) memset(to, 0, (size_t)(count * size));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); i++) {
        Py_ssize_t at = PyLong_AsSsize_t(PyList_GET_ITEM(places, i));
        if (at < 0 || at >= count) goto outside;
        memcpy(to + at * size, from + i * size, (size_t)size);
    }
    while (PyDict_Next(others, &next, &place, &record)) {
        Py_ssize_t at = PyLong_AsSsize_t(place);
        if (at < 0 || at >= count || !PyBytes_Check(record) || PyBytes_GET_SIZE(record) != size) goto outside;
        memcpy(to + at * size, PyBytes_AS_STRING(record), (size_t)size);
    }
    goto end;
outside:
    Py_CLEAR(whole);
    if (!PyErr_Occurred()) wrong("a place that is not there, or a record of another size");
end:
    give(&rows);
    return whole;
}

#endif
