/* The compiled functions as a module of Python's.

   Arguments are ctypes structures, by the buffer that each is: a call takes 0.1 µs, and one by
   ctypes takes 0.7.  While they run, other threads of Python's may. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "compiled.h"

/* Give the structure that an argument is, or NULL with an error set. */
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

/* The layout that compiled.py must repeat. */
static PyObject *layout(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return Py_BuildValue("nnnnnni", sizeof(struct copy), sizeof(struct sum), sizeof(struct meeting),
                         sizeof(struct check), sizeof(struct step), sizeof(struct program), KINDS);
}

static PyMethodDef functions[] = {
    {"copy", copy, METH_O, "Do a struct copy."},
    {"sum", sum, METH_O, "Do a struct sum."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "Run a struct program, as operation number so and so, from a step on."},
    {"width", width, METH_NOARGS, "Bytes of the widest vector; 0 if there is nothing to call."},
    {"layout", layout, METH_NOARGS, "Bytes of each structure, number of kinds of steps."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_compiled", "See compiled.py.", 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) { return PyModuleDef_Init(&module); }
