/* Compiled functions for the work per record in a batch of stored records; cache/native/loader.py selects their
   replacement in Python if they are missing. */
#include "announced.h"
#include "answers.h"
#include "dots.h"
#include "flights.h"
#include "hashes.h"
#include "parts.h"
#include "replies.h"
#include "streams.h"

static PyMethodDef parts_methods[] = {
    {"find", (PyCFunction)parts_find, METH_O, "int64 positions of uint64 hashes, -1 where one is absent."},
    {"locate", (PyCFunction)parts_locate, METH_VARARGS, "(int64 pages, int64 offsets) of int64 positions."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot parts_slots[] = {
    {Py_tp_dealloc, parts_dealloc}, {Py_tp_new, parts_new}, {Py_tp_methods, parts_methods}, {0, NULL},
};

static PyType_Spec parts_spec = {"cache.native._columns.HashParts", sizeof(parts_object), 0, Py_TPFLAGS_DEFAULT, parts_slots};

static PyMethodDef scanner_methods[] = {
    {"admits", (PyCFunction)scanner_admits, METH_O, "Whether nothing up to here announces more than the bounds."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scanner_slots[] = {
    {Py_tp_dealloc, scanner_dealloc}, {Py_tp_new, scanner_new}, {Py_tp_methods, scanner_methods}, {0, NULL},
};

static PyType_Spec scanner_spec = {
    "cache.native._columns.ReplyScanner", sizeof(scanner_object), 0, Py_TPFLAGS_DEFAULT, scanner_slots,
};

static PyMethodDef methods[] = {
    {"hashes", hashes, METH_VARARGS, "64-bit xxh3 of each id; None if one is too long."},
    {"text_hashes", text_hashes, METH_VARARGS, "64-bit xxh3 of each text between int32 cuts; None if one is too long."},
    {"could_be", could_be, METH_VARARGS, "Whether these are, or begin, so many bulk strings of one length."},
    {"records_of", records_of, METH_VARARGS, "(a copy of records that lie a step apart, how many are sound)."},
    {"stream", stream, METH_VARARGS, "An Arrow stream of one record batch."},
    {"joined", joined, METH_O, "(int32 cuts, bytes) of a list of bytes; None if it is none."},
    {"board", board, METH_VARARGS, "Enters keys that are not there; the places of the others."},
    {"leave", leave, METH_VARARGS, "Takes away keys, as far as they are there."},
    {"spread", spread, METH_VARARGS, "Records at their places among others, else zeros."},
    {"are_ids", are_ids, METH_VARARGS, "Whether each is bytes, at least one and at most so many."},
    {"getranges", getranges, METH_VARARGS, "One GETRANGE per page and offset, as bytes."},
    {"cut_texts", cut_texts, METH_VARARGS, "The texts between int32 cuts; None unless all is sound and ASCII."},
    {"dots", dots, METH_VARARGS, "float32 products of a vector with rows of a matrix, by int64 ordinals."},
    {"plain_record_mask", plain_record_mask, METH_VARARGS, "A byte per record: whether it is a plain answer."},
    {"numbers", numbers, METH_VARARGS, "The first k numbers of each record, float32."},
    {"names", names, METH_VARARGS, "(ids of the first k items of each record, int32 cuts)."},
    {"answers", answers, METH_VARARGS, "JSON of each record; a tuple of missing numerals; None."},
    {NULL, NULL, 0, NULL},
};

static int add(PyObject *module, const char *name, PyObject *value) {
    int failed = PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static int add_all(PyObject *module) {
    PyObject *layout = Py_BuildValue(
        "{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "payload", HEADER, "fingerprint", FINGERPRINT_AT, "count", COUNT_AT, "flags",
        FLAGS_AT, "exponent", EXPONENT_AT, "format_shift", FORMAT_SHIFT, "numeral", NUMERAL, "dropped_bits", DROPPED);
    if (add(module, "LAYOUT", layout) || add(module, "HashParts", PyType_FromSpec(&parts_spec))) return -1;
    if (add(module, "ReplyScanner", PyType_FromSpec(&scanner_spec))) return -1;
    return PyModule_AddIntConstant(module, "VERSION", 6);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_all}, {0, NULL}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_columns", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__columns(void) { return PyModuleDef_Init(&module); }
