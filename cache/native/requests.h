/* Formatting of many GETRANGE commands for one table's pages, and ids of an Arrow column. */
#ifndef LARDER_REQUESTS_H
#define LARDER_REQUESTS_H

#include "taken.h"

#define DIGITS_MAX 20

static int digits_of(uint64_t number, char *to) {
    char back[DIGITS_MAX];
    int count = 0;
    do back[count++] = (char)('0' + number % 10);
    while (number /= 10);
    for (int i = 0; i < count; i++) to[i] = back[count - 1 - i];
    return count;
}

static char *copied(char *to, const char *from, Py_ssize_t size) {
    memcpy(to, from, (size_t)size);
    return to + size;
}

/* `$<length>\r\n<before><number>\r\n` */
static char *bulk(char *to, const char *before, Py_ssize_t size, uint64_t number) {
    char digits[DIGITS_MAX];
    int count = digits_of(number, digits);
    *to++ = '$';
    to += digits_of((uint64_t)(size + count), to);
    to = copied(to, "\r\n", 2);
    to = copied(to, before, size);
    to = copied(to, digits, count);
    return copied(to, "\r\n", 2);
}

/* Format one command per page and offset. Arguments: key prefix, int64 pages, int64 offsets, bytes to read. */
static PyObject *getranges(PyObject *module, PyObject *args) {
    static const char head[] = "*4\r\n$8\r\nGETRANGE\r\n";
    const char *prefix;
    Py_ssize_t prefix_size;
    PyObject *sent_pages, *sent_offsets, *found = NULL;
    long long length;
    taken given = {0}, beside = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "y#OOL", &prefix, &prefix_size, &sent_pages, &sent_offsets, &length))
        return NULL;
    if (!take(sent_pages, &given) || !take(sent_offsets, &beside)) goto end;
    Py_ssize_t count = given.view.len / 8;
    if (beside.view.len != given.view.len || length < 1) {
        wrong("one offset per page, and at least a byte to read");
        goto end;
    }
    const any_i64 *pages = given.view.buf, *offsets = beside.view.buf;
    size_t most = sizeof(head) + (size_t)prefix_size + 3 * (2 * DIGITS_MAX + 5);
    char *space = PyMem_Malloc((size_t)(count ? count : 1) * most), *at = space;
    if (!space) {
        PyErr_NoMemory();
        goto end;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (pages[i] < 0 || offsets[i] < 0 || offsets[i] > INT64_MAX - length) {
            PyMem_Free(space);
            wrong("pages and offsets are not negative");
            goto end;
        }
        at = copied(at, head, sizeof(head) - 1);
        at = bulk(at, prefix, prefix_size, (uint64_t)pages[i]);
        at = bulk(at, "", 0, (uint64_t)offsets[i]);
        at = bulk(at, "", 0, (uint64_t)(offsets[i] + length - 1));
    }
    found = PyBytes_FromStringAndSize(space, at - space);
    PyMem_Free(space);
end:
    give(&given);
    give(&beside);
    return found;
}

/* Whether each element of a list is bytes with a length from 1 to a maximum. */
static PyObject *are_ids(PyObject *module, PyObject *args) {
    PyObject *ids;
    Py_ssize_t most;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!n", &PyList_Type, &ids, &most)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ids); i++) {
        PyObject *each = PyList_GET_ITEM(ids, i);
        if (!PyBytes_Check(each) || PyBytes_GET_SIZE(each) < 1 || PyBytes_GET_SIZE(each) > most) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static int is_utf8(const char *text, Py_ssize_t size) {
    unsigned char all = 0;
    for (Py_ssize_t i = 0; i < size; i++) all |= (unsigned char)text[i];
    if (all < 0x80) return 1;
    PyObject *decoded = PyUnicode_DecodeUTF8(text, size, NULL);
    if (!decoded) PyErr_Clear();
    Py_XDECREF(decoded);
    return decoded != NULL;
}

/* Return the texts between int32 cuts (one more than texts) as bytes; None unless the cuts are valid and each text is
   UTF-8. */
static PyObject *cut_texts(PyObject *module, PyObject *args) {
    PyObject *sent, *sent_cuts, *found = NULL;
    taken given = {0}, ends = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &sent, &sent_cuts)) return NULL;
    if (!take(sent, &given) || !take(sent_cuts, &ends)) goto end;
    const char *data = given.view.buf;
    const any_i32 *cuts = ends.view.buf;
    Py_ssize_t count = ends.view.len / 4 - 1;
    int is_sound = count >= 0 && cuts[0] >= 0 && cuts[count] <= given.view.len;
    for (Py_ssize_t i = 0; is_sound && i < count; i++) is_sound = cuts[i] <= cuts[i + 1];
    found = is_sound ? PyList_New(count) : Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; is_sound && found && i < count; i++) {
        const char *text = data + cuts[i];
        Py_ssize_t size = cuts[i + 1] - cuts[i];
        if (!(is_sound = is_utf8(text, size))) {
            Py_SETREF(found, Py_NewRef(Py_None));
            break;
        }
        PyObject *copy = PyBytes_FromStringAndSize(text, size);
        if (!copy) Py_CLEAR(found);
        else PyList_SET_ITEM(found, i, copy);
    }
end:
    give(&given);
    give(&ends);
    return found;
}

#endif
