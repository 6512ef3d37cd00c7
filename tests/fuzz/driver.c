/* libFuzzer within a Python module: `run(arguments, target)` calls `target(bytes)` with inputs that reach new code.
 *
 * It is linked into one file with the code to be fuzzed, so that the counters of that code are libFuzzer's own. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerRunDriver(int *argc, char ***argv, int (*callback)(const uint8_t *data, size_t size));

static PyObject *target;

static int call(const uint8_t *data, size_t size) {
    PyObject *done = PyObject_CallFunction(target, "y#", (const char *)data, (Py_ssize_t)size);
    if (!done) {
        PyErr_Print();
        fflush(stderr);
        abort(); /* libFuzzer writes the input down */
    }
    Py_DECREF(done);
    return 0;
}

static PyObject *run(PyObject *module, PyObject *args) {
    PyObject *words;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &words, &target)) return NULL;
    int argc = (int)PyList_GET_SIZE(words);
    char **argv = calloc((size_t)argc + 1, sizeof *argv);
    if (!argv) return PyErr_NoMemory();
    for (int i = 0; i < argc; i++)
        if (!(argv[i] = (char *)PyUnicode_AsUTF8(PyList_GET_ITEM(words, i)))) return free(argv), NULL;
    int code = LLVMFuzzerRunDriver(&argc, &argv, call);
    return PyLong_FromLong(code);
}

static PyMethodDef methods[] = {{"run", run, METH_VARARGS, "Fuzz a function of bytes."}, {NULL, NULL, 0, NULL}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fuzzer", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fuzzer(void) { return PyModule_Create(&module); }
