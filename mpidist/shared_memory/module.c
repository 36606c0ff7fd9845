/* The compiled functions as a Python extension module.

   Arguments are ctypes structures, passed as buffers: a call takes 0.1 µs, and 0.7 through ctypes.
   The functions release Python's lock, so other threads can run meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "compiled.h"

/* Return the structure in an argument's buffer, or NULL with an exception set. */
static const void *structure(PyObject *argument, Py_buffer *view, size_t size)
{
    if (PyObject_GetBuffer(argument, view, PyBUF_SIMPLE) < 0)
        return NULL;
    if ((size_t)view->len == size)
        return view->buf;
    PyErr_Format(PyExc_TypeError, "%zd bytes, not %zu", view->len, size);
    PyBuffer_Release(view);
    return NULL;
}

#define CALL_OF(NAME, TYPE)                                                                        \
    static PyObject *NAME(PyObject *module, PyObject *argument)                                    \
    {                                                                                              \
        Py_buffer view;                                                                            \
        const TYPE *what = structure(argument, &view, sizeof(TYPE));                               \
        (void)module;                                                                              \
        if (!what)                                                                                 \
            return NULL;                                                                           \
        Py_BEGIN_ALLOW_THREADS mpidist_##NAME(what);                                               \
        Py_END_ALLOW_THREADS PyBuffer_Release(&view);                                              \
        Py_RETURN_NONE;                                                                            \
    }

CALL_OF(copy, struct copy)
CALL_OF(sum, struct sum)

static PyObject *run(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    Py_buffer view;
    const struct program *program;
    int64_t sequence;
    int at;

    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "program, sequence and step are needed");
        return NULL;
    }
    sequence = PyLong_AsLongLong(arguments[1]);
    at = (int)PyLong_AsLong(arguments[2]);
    if (PyErr_Occurred() || !(program = structure(arguments[0], &view, sizeof *program)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    at = mpidist_run(program, sequence, at);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromLong(at);
}

static PyObject *width(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromLong(mpidist_width());
}

/* Return the layout, for compiled.py to compare with its own. */
static PyObject *layout(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return Py_BuildValue("nnnnnni", sizeof(struct copy), sizeof(struct sum), sizeof(struct meeting),
                         sizeof(struct check), sizeof(struct step), sizeof(struct program), KINDS);
}

static PyMethodDef functions[] = {
    {"copy", copy, METH_O, "Run a struct copy."},
    {"sum", sum, METH_O, "Run a struct sum."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "Run a struct program for an operation's sequence number, from a step on."},
    {"width", width, METH_NOARGS, "Return the bytes of the widest vector, or 0."},
    {"layout", layout, METH_NOARGS, "Return the sizes of the structures and the number of kinds."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_compiled", "See compiled.py.", 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&module); }
