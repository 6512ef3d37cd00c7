/* Arrow stream of one record batch, assembled from its columns' buffers: see serving/arrow/writer.py. */
#ifndef LARDER_STREAMS_H
#define LARDER_STREAMS_H

#include "taken.h"

static int put_numbers(char *head, Py_ssize_t room, Py_ssize_t at, const int64_t *numbers, Py_ssize_t count) {
    if (at < 0 || at > room || (room - at) / 8 < count) return wrong("a number reaches beyond the metadata"), 0;
    memcpy(head + at, numbers, (size_t)count * 8);
    return 1;
}

static int put_nodes(char *head, Py_ssize_t room, Py_ssize_t at, PyObject *nodes) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(nodes); i++) {
        /* Only int: another object's __index__ would run here and could change the buffers whose sizes were already
           summed. */
        if (!PyLong_Check(PyList_GET_ITEM(nodes, i))) return wrong("numbers of nodes are integers"), 0;
        int64_t number = PyLong_AsLongLong(PyList_GET_ITEM(nodes, i));
        if (PyErr_Occurred() || !put_numbers(head, room, at + 8 * i, &number, 1)) return 0;
    }
    return 1;
}

/* Return leading bytes, metadata with its numbers, buffers padded to 8 bytes each, and trailing bytes. */
static PyObject *stream(PyObject *module, PyObject *args) {
    const char *before, *metadata, *after;
    Py_ssize_t before_size, size, after_size, body_at, rows_at, nodes_at, buffers_at;
    PyObject *nodes, *buffers, *found;
    long long rows;
    int64_t body = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#y#nnnnLO!O!y#", &before, &before_size, &metadata, &size, &body_at, &rows_at,
                          &nodes_at, &buffers_at, &rows, &PyList_Type, &nodes, &PyList_Type, &buffers, &after,
                          &after_size))
        return NULL;
    if (nodes_at < 0 || nodes_at > size || buffers_at < 0 || buffers_at > size) return wrong("numbers lie in the metadata");
    Py_ssize_t count = PyList_GET_SIZE(buffers);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyBytes_Check(PyList_GET_ITEM(buffers, i))) return wrong("buffers are bytes");
        body += (PyBytes_GET_SIZE(PyList_GET_ITEM(buffers, i)) + 7) / 8 * 8;
    }
    if (!(found = PyBytes_FromStringAndSize(NULL, before_size + size + body + after_size))) return NULL;
    char *to = PyBytes_AS_STRING(found), *head = to + before_size, *at = head + size;
    memcpy(to, before, (size_t)before_size);
    memcpy(head, metadata, (size_t)size);
    int64_t number = rows, place[2] = {0, 0};
    int is_done = put_numbers(head, size, body_at, &body, 1) && put_numbers(head, size, rows_at, &number, 1) &&
                  put_nodes(head, size, nodes_at, nodes);
    for (Py_ssize_t i = 0; is_done && i < count; i++) {
        PyObject *each = PyList_GET_ITEM(buffers, i);
        Py_ssize_t padding = -PyBytes_GET_SIZE(each) & 7;
        place[1] = PyBytes_GET_SIZE(each);
        is_done = put_numbers(head, size, buffers_at + 16 * i, place, 2);
        memcpy(at, PyBytes_AS_STRING(each), (size_t)place[1]);
        memset(at + place[1], 0, (size_t)padding);
        at += place[1] + padding;
        place[0] += place[1] + padding;
    }
    memcpy(at, after, (size_t)after_size);
    if (!is_done) Py_CLEAR(found);
    return found;
}

/* Return (int32 cuts, concatenated bytes) of a list of bytes; None if the list contains anything else. */
static PyObject *joined(PyObject *module, PyObject *texts) {
    int64_t total = 0;
    (void)module;
    if (!PyList_Check(texts)) Py_RETURN_NONE;
    Py_ssize_t count = PyList_GET_SIZE(texts);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyBytes_Check(PyList_GET_ITEM(texts, i))) Py_RETURN_NONE;
        total += PyBytes_GET_SIZE(PyList_GET_ITEM(texts, i));
    }
    if (total > INT32_MAX) Py_RETURN_NONE;
    PyObject *cuts = PyBytes_FromStringAndSize(NULL, 4 * (count + 1));
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)total), *both = NULL;
    if (cuts && data) {
        any_i32 *cut = (any_i32 *)PyBytes_AS_STRING(cuts);
        char *start = PyBytes_AS_STRING(data), *to = start;
        *cut++ = 0;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *each = PyList_GET_ITEM(texts, i);
            memcpy(to, PyBytes_AS_STRING(each), (size_t)PyBytes_GET_SIZE(each));
            to += PyBytes_GET_SIZE(each);
            *cut++ = (int32_t)(to - start);
        }
        both = PyTuple_Pack(2, cuts, data);
    }
    Py_XDECREF(cuts);
    Py_XDECREF(data);
    return both;
}

#endif
