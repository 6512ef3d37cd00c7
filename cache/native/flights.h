/* Keys of pending reads: many are inserted into a dictionary, and removed, per call: see cache/tiers/singleflight.py.
   */
#ifndef LARDER_FLIGHTS_H
#define LARDER_FLIGHTS_H

#include "taken.h"

/* Insert `flight` under each key that is absent; return the indexes of the other keys. */
static PyObject *board(PyObject *module, PyObject *args) {
    PyObject *flights, *keys, *flight, *rest;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyDict_Type, &flights, &PyList_Type, &keys, &flight)) return NULL;
    if (!(rest = PyList_New(0))) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
        Py_ssize_t before = PyDict_GET_SIZE(flights);
        PyObject *key = Py_NewRef(PyList_GET_ITEM(keys, i)), *place = NULL;
        int failed = !PyDict_SetDefault(flights, key, flight);
        Py_DECREF(key);
        if (!failed && PyDict_GET_SIZE(flights) == before)
            failed = !(place = PyLong_FromSsize_t(i)) || PyList_Append(rest, place);
        Py_XDECREF(place);
        if (failed) {
            Py_DECREF(rest);
            return NULL;
        }
    }
    return rest;
}

/* Remove each of a list of keys. */
static PyObject *leave(PyObject *module, PyObject *args) {
    PyObject *flights, *keys;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &flights, &PyList_Type, &keys)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = Py_NewRef(PyList_GET_ITEM(keys, i));
        int failed = PyDict_DelItem(flights, key) && !PyErr_ExceptionMatches(PyExc_KeyError);
        Py_DECREF(key);
        if (failed) return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

#endif
