/* Sizes that a server's replies announce, checked before a parser allocates memory: see cache/l2/resp.py. */
#ifndef LARDER_ANNOUNCED_H
#define LARDER_ANNOUNCED_H

#include "taken.h"

/* Larger than any bound on elements or bytes, and far from arithmetic overflow. */
#define BOUND_MAX ((Py_ssize_t)1 << 48)

/* State of the scanner: within a payload (`skip` bytes of it are left), within a header (`kind` is its first byte), or
   between two replies (`open` is 0). */
typedef struct {
    PyObject_HEAD
    Py_ssize_t elements, payload; /* bounds */
    Py_ssize_t skip, open, announced, number, digits;
    int kind, is_number, is_return, is_refused;
} scanner_object;

#define NO_HEADER (-1)
#define HEADER_MAX 64 /* number of digits from which the parser rejects a header */

static PyObject *scanner_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    Py_ssize_t elements, payload;
    (void)named;
    if (!PyArg_ParseTuple(args, "nn", &elements, &payload)) return NULL;
    if (elements < 0 || payload < 0 || elements > BOUND_MAX || payload > BOUND_MAX) return wrong("no such bounds");
    scanner_object *self = (scanner_object *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->elements = elements;
    self->payload = payload;
    self->kind = NO_HEADER;
    return (PyObject *)self;
}

static void scanner_dealloc(scanner_object *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static void begin_header(scanner_object *self, unsigned char first) {
    self->kind = first;
    self->number = self->digits = 0;
    self->is_number = first && strchr("*~%>|$=", first) != NULL;
    self->is_return = first == '\r';
}

static void add_to_header(scanner_object *self, unsigned char next) {
    /* A carriage return without a newline is part of the line, but not of a number. */
    if (self->is_return || (next != '\r' && (next < '0' || next > '9'))) self->is_number = 0;
    self->is_return = next == '\r';
    if (!self->is_number || self->is_return) return;
    if (++self->digits >= HEADER_MAX) self->is_number = 0;
    if (self->number <= BOUND_MAX) self->number = self->number * 10 + (next - '0'); /* saturate above every bound */
}

/* Whether the sizes in a complete header are within the bounds. */
static int end_header(scanner_object *self) {
    int kind = self->kind, is_bulk = kind == '$' || kind == '=';
    self->kind = NO_HEADER;
    if (!self->open) self->open = 1, self->announced = 0;
    self->open--;
    /* The parser rejects a header that is not a number; a negative number announces nothing. */
    if (!self->is_number || !self->digits) return 1;
    if (is_bulk) {
        if (self->number > self->payload) return 0;
        self->skip = self->number + 2;
        return 1;
    }
    if (self->number > self->elements - self->announced) return 0;
    self->announced += self->number;
    self->open += kind == '%' || kind == '|' ? 2 * self->number : self->number;
    return 1;
}

/* Scan the next bytes; False from the first byte on with which a reply announces more than the bounds. */
static PyObject *scanner_admits(scanner_object *self, PyObject *sent) {
    taken data = {0};
    if (!take(sent, &data)) return NULL;
    const unsigned char *at = data.view.buf, *end = at + data.view.len;
    while (at < end && !self->is_refused) {
        if (self->skip) {
            Py_ssize_t passed = self->skip < end - at ? self->skip : end - at;
            self->skip -= passed;
            at += passed;
        } else if (self->kind == NO_HEADER) {
            begin_header(self, *at++);
        } else if (self->is_return && *at == '\n') {
            at++;
            self->is_refused = !end_header(self);
        } else {
            add_to_header(self, *at++);
        }
    }
    give(&data);
    return PyBool_FromLong(!self->is_refused);
}

#endif
