/* The compiled functions as a Python extension module, within Python's stable ABI (setup.py): one
   build serves every Python from 3.10 on.

   An argument is the address of a ctypes structure, and the caller keeps the structure: a call
   takes 0.1 µs, and 0.7 through ctypes.  The functions release Python's lock, so other threads can
   run meanwhile. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "compiled.h"

/* A new reference to None.  That macro of Python 3.12 and 3.13 takes none, as None is immortal
   there: of a module that they compile for all Pythons, 3.10 and 3.11 would free it. */
static PyObject *none(void)
{
    Py_INCREF(Py_None);
    return Py_None;
}

#define CALL_OF(NAME, TYPE)                                                                        \
    static PyObject *NAME(PyObject *module, PyObject *argument)                                    \
    {                                                                                              \
        const TYPE *what = PyLong_AsVoidPtr(argument);                                             \
        (void)module;                                                                              \
        if (!what && PyErr_Occurred())                                                             \
            return NULL;                                                                           \
        Py_BEGIN_ALLOW_THREADS mpidist_##NAME(what);                                               \
        Py_END_ALLOW_THREADS return none();                                                        \
    }

CALL_OF(copy, struct copy)
CALL_OF(sum, struct sum)

static PyObject *run(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    const struct program *program;
    int64_t sequence;
    int at;

    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "program, sequence and step are needed");
        return NULL;
    }
    program = PyLong_AsVoidPtr(arguments[0]);
    sequence = PyLong_AsLongLong(arguments[1]);
    at = (int)PyLong_AsLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    at = mpidist_run(program, sequence, at);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(at);
}

/* A call without giving up Python's lock: a few stores. */
static PyObject *announce(PyObject *module, PyObject *const *arguments, Py_ssize_t count)
{
    const struct meeting *meeting;
    int64_t sequence, mark;

    (void)module;
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "meeting, sequence and mark are needed");
        return NULL;
    }
    meeting = PyLong_AsVoidPtr(arguments[0]);
    sequence = PyLong_AsLongLong(arguments[1]);
    mark = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    mpidist_announce(meeting, sequence, mark);
    return none();
}

/* Return the four sums of a digest, of bytes given by their address and count. */
static PyObject *digest(PyObject *module, PyObject *arguments)
{
    unsigned long long address;
    Py_ssize_t count;
    uint64_t sums[DIGEST];

    (void)module;
    if (!PyArg_ParseTuple(arguments, "Kn", &address, &count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    mpidist_digest((uintptr_t)address, (size_t)count, sums);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("KKKK", (unsigned long long)sums[0], (unsigned long long)sums[1],
                         (unsigned long long)sums[2], (unsigned long long)sums[3]);
}

static PyObject *width(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromLong(mpidist_width());
}

/* Return the address of this process's pace. */
static PyObject *pace(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyLong_FromVoidPtr(&mpidist_pace);
}

/* Count a copy that would cost `ordinary` or `streaming` ticks a KiB; return whether it streams. */
static PyObject *paced(PyObject *module, PyObject *arguments)
{
    unsigned long long at, ordinary, streaming;
    struct pace *counted;
    int streamed;

    (void)module;
    if (!PyArg_ParseTuple(arguments, "KKK", &at, &ordinary, &streaming))
        return NULL;
    counted = (struct pace *)(uintptr_t)at;
    streamed = mpidist_streams_next(counted);
    mpidist_took(counted, streamed, streamed ? streaming : ordinary);
    return PyBool_FromLong(streamed);
}

static PyObject *runs_steps(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return PyBool_FromLong(mpidist_runs_steps());
}

/* Return the layout, for compiled.py to compare with its own. */
static PyObject *layout(PyObject *module, PyObject *nothing)
{
    (void)module, (void)nothing;
    return Py_BuildValue("nnnnnnnnii", sizeof(struct copy), sizeof(struct sum), sizeof(struct meeting),
                         sizeof(struct check), sizeof(struct step), sizeof(struct program),
                         sizeof(struct pace), sizeof(struct flight), KINDS, NUMBERS);
}

static PyMethodDef functions[] = {
    {"copy", copy, METH_O, "Run a struct copy."},
    {"sum", sum, METH_O, "Run a struct sum."},
    {"run", (PyCFunction)(void (*)(void))run, METH_FASTCALL,
     "Run a struct program for an operation's sequence number, from a step on."},
    {"announce", (PyCFunction)(void (*)(void))announce, METH_FASTCALL,
     "Announce an operation by a struct meeting: its sequence number and fingerprint."},
    {"digest", digest, METH_VARARGS, "Return the four sums of a digest of bytes."},
    {"pace", pace, METH_NOARGS, "Return the address of the struct pace of this process."},
    {"paced", paced, METH_VARARGS, "Count a copy of two costs in a struct pace."},
    {"width", width, METH_NOARGS, "Return the bytes of the widest vector, or 0."},
    {"runs_steps", runs_steps, METH_NOARGS, "Return whether there is code for steps."},
    {"layout", layout, METH_NOARGS, "Return the sizes of the structures and the numbers of kinds."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_functions", "See compiled.py.", 0, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__functions(void) { return PyModuleDef_Init(&module); }
