/* Answers as JSON: for each record the first `k` items and their scores, between texts that Python passes. */
#ifndef LARDER_ANSWERS_H
#define LARDER_ANSWERS_H

#include "lists.h"

#define ID_MAX 256

typedef struct {
    records all;
    catalogue items;
    taken numerals;
    Py_ssize_t k;
    PyObject *head, *names, *ends, *middle, *after, *last, *missing;
    any_f32 *scores;
    char *space;
} writing;

static char *piece(char *to, PyObject *bytes) {
    return memcpy(to, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes)) + PyBytes_GET_SIZE(bytes);
}

/* Scores separated by commas, or NULL; notes a number that was never written. */
static char *json_scores(writing *now, Py_ssize_t row, char *to) {
    numbers_of(&now->all, row, now->k, now->scores);
    for (Py_ssize_t i = 0; i < now->k; i++) {
        uint32_t key;
        const char *text = numeral_of(now->numerals.view.buf, now->scores[i], &key);
        if (!text) return NULL;
        if (!*text) {
            PyObject *number = PyLong_FromUnsignedLong(key);
            int failed = !number || PyList_Append(now->missing, number);
            Py_XDECREF(number);
            if (failed) return NULL;
        }
        memcpy(to, text + 1, NUMERAL - 1);
        to += *text;
        *to++ = ',';
    }
    return to - 1;
}

static int begin(writing *now, Py_ssize_t count) {
    if (now->k < 1 || now->k > now->all.width) return wrong("so many items no record has"), 0;
    if (now->all.count != count || PyList_GET_SIZE(now->ends) != count) return wrong("one name and one end per record"), 0;
    if (now->numerals.view.len < (Py_ssize_t)NUMERAL << (32 - DROPPED)) return wrong("too few numerals"), 0;
    Py_ssize_t most = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *name = PyList_GET_ITEM(now->names, i), *end = PyList_GET_ITEM(now->ends, i);
        if (!PyBytes_Check(name) || !PyBytes_Check(end)) return wrong("names and ends are bytes"), 0;
        Py_ssize_t size = PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(end);
        most = size > most ? size : most;
    }
    most += PyBytes_GET_SIZE(now->head) + PyBytes_GET_SIZE(now->middle) + PyBytes_GET_SIZE(now->after) + PyBytes_GET_SIZE(now->last);
    now->space = PyMem_Malloc((size_t)(most + now->k * (ID_MAX + 3 + NUMERAL)));
    now->scores = PyMem_Malloc((size_t)now->k * sizeof(float));
    now->missing = PyList_New(0);
    if (!now->space || !now->scores || !now->missing) return PyErr_NoMemory(), 0;
    return 1;
}

/* The JSON of one record; NULL without an error if this code cannot write it. */
static PyObject *one(writing *now, Py_ssize_t row) {
    char *to = piece(piece(now->space, now->head), PyList_GET_ITEM(now->names, row));
    to = piece(to, now->middle);
    to = json_items(&now->items, items_of(&now->all, row), now->k, to, now->k * (ID_MAX + 3));
    if (!to) return NULL;
    to = json_scores(now, row, piece(to, now->after));
    if (!to) return NULL;
    to = piece(piece(to, now->last), PyList_GET_ITEM(now->ends, row));
    return PyBytes_FromStringAndSize(now->space, to - now->space);
}

static PyObject *every(writing *now, Py_ssize_t count) {
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found && i < count; i++) {
        PyObject *text = one(now, i);
        if (text) {
            PyList_SET_ITEM(found, i, text);
            continue;
        }
        Py_CLEAR(found);
        if (!PyErr_Occurred()) return Py_NewRef(Py_None);
    }
    if (found && PyList_GET_SIZE(now->missing)) Py_SETREF(found, PyList_AsTuple(now->missing));
    return found;
}

/* Return a list of bytes: head, name, middle, items, after, scores, last, end. A tuple: keys of missing numerals. None:
   the caller must format the answers in Python. */
static PyObject *answers(PyObject *module, PyObject *args) {
    PyObject *sent, *ids, *offsets, *numerals, *found = NULL;
    Py_ssize_t width;
    int is_half;
    writing now = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OnpnOOOSO!SSSO!", &sent, &width, &is_half, &now.k, &ids, &offsets, &numerals,
                          &now.head, &PyList_Type, &now.names, &now.middle, &now.after, &now.last, &PyList_Type, &now.ends))
        return NULL;
    if (take_records(sent, width, 1, is_half, &now.all) && take_catalogue(ids, offsets, &now.items) &&
        take(numerals, &now.numerals) && begin(&now, PyList_GET_SIZE(now.names)))
        found = every(&now, PyList_GET_SIZE(now.names));
    give(&now.all.lent);
    give_catalogue(&now.items);
    give(&now.numerals);
    PyMem_Free(now.space);
    PyMem_Free(now.scores);
    Py_XDECREF(now.missing);
    return found;
}

#endif
