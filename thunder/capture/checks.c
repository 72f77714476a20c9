/* The functions of checks.py, compiled. They do the same: they look many things up in one call, and compare
   identities. Arguments are tuples of containers and of keys, and a list of what is expected, all of one length.

   Only CPython's public API is used. */

#include <Python.h>

static PyObject *truth(int value) { return value < 0 ? NULL : Py_NewRef(value ? Py_True : Py_False); }

static int fits(PyObject *const *arguments, Py_ssize_t given, Py_ssize_t tuples, Py_ssize_t lists)
{
    int fine = given == tuples + lists;
    for (Py_ssize_t i = 0; fine && i < given; i++)
        fine = (i < tuples ? PyTuple_Check(arguments[i]) : PyList_Check(arguments[i]))
            && Py_SIZE(arguments[i]) == Py_SIZE(arguments[0]);
    if (!fine)
        PyErr_SetString(PyExc_TypeError, "tuples, and a list of what is expected, of one length");
    return fine;
}

/* Whether what was raised says that nothing is there; it is no error then. */
static int is_gone(void)
{
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_LookupError)
        && !PyErr_ExceptionMatches(PyExc_ValueError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* 1 where what was found, a new reference, is `expected`; 0 where it is not, or nothing was found; -1 with an error. */
static int is_same(PyObject *found, PyObject *expected)
{
    if (found == NULL)
        return is_gone() ? 0 : -1;
    Py_DECREF(found);
    return found == expected;
}

/* The same of an entry of a table; `missing` (or NULL) is expected where nothing is. */
static int entry_is(PyObject *table, PyObject *key, PyObject *expected, PyObject *missing)
{
    if (!PyDict_Check(table)) {
        int same = is_same(PyObject_GetItem(table, key), expected);
        return same == 0 && expected == missing ? !PySequence_Contains(table, key) : same;
    }
    PyObject *found = PyDict_GetItemWithError(table, key);
    if (found == NULL && PyErr_Occurred())
        return -1;
    return expected == (found != NULL ? found : missing);
}

static PyObject *entries_are(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments, given, 2, 1))
        return NULL;
    int same = 1;
    for (Py_ssize_t i = 0; same > 0 && i < Py_SIZE(arguments[0]); i++)
        same = entry_is(PyTuple_GET_ITEM(arguments[0], i), PyTuple_GET_ITEM(arguments[1], i),
                        PyList_GET_ITEM(arguments[2], i), NULL);
    return truth(same);
}

static PyObject *holds(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments + 1, given - 2, 1, 1))
        return NULL;
    int same = 1;
    for (Py_ssize_t i = 0; same > 0 && i < Py_SIZE(arguments[1]); i++)
        same = entry_is(arguments[0], PyTuple_GET_ITEM(arguments[1], i), PyList_GET_ITEM(arguments[2], i), arguments[3]);
    return truth(same);
}

static PyObject *attributes_are(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments, given, 2, 1))
        return NULL;
    int same = 1;
    for (Py_ssize_t i = 0; same > 0 && i < Py_SIZE(arguments[0]); i++) {
        PyObject *found = PyObject_GetAttr(PyTuple_GET_ITEM(arguments[0], i), PyTuple_GET_ITEM(arguments[1], i));
        same = is_same(found, PyList_GET_ITEM(arguments[2], i));
    }
    return truth(same);
}

static PyObject *types_are(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments, given, 1, 1))
        return NULL;
    int same = 1;
    for (Py_ssize_t i = 0; same && i < Py_SIZE(arguments[0]); i++)
        same = (PyObject *)Py_TYPE(PyTuple_GET_ITEM(arguments[0], i)) == PyList_GET_ITEM(arguments[1], i);
    return truth(same);
}

static PyObject *none_in(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments, given, 2, 0))
        return NULL;
    int found = 0;
    for (Py_ssize_t i = 0; !found && i < Py_SIZE(arguments[0]); i++) {
        PyObject *table = PyTuple_GET_ITEM(arguments[0], i), *key = PyTuple_GET_ITEM(arguments[1], i);
        found = PyDict_Check(table) ? PyDict_Contains(table, key) : PySequence_Contains(table, key);
    }
    return truth(found < 0 ? -1 : !found);
}

static PyObject *read_entries(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (!fits(arguments, given - 1, 2, 0))
        return NULL;
    PyObject *values = PyTuple_New(Py_SIZE(arguments[0]));
    for (Py_ssize_t i = 0; values != NULL && i < Py_SIZE(arguments[0]); i++) {
        PyObject *table = PyTuple_GET_ITEM(arguments[0], i), *key = PyTuple_GET_ITEM(arguments[1], i);
        PyObject *found = PyDict_Check(table) ? Py_XNewRef(PyDict_GetItemWithError(table, key)) : PyObject_GetItem(table, key);
        if (found == NULL && PyErr_Occurred() && !is_gone())
            Py_CLEAR(values);
        else
            PyTuple_SET_ITEM(values, i, found != NULL ? found : Py_NewRef(arguments[2]));
    }
    return values;
}

static PyObject *keys_are(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 2 || !PyTuple_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "a table and a tuple of keys");
        return NULL;
    }
    PyObject *key, *value;
    Py_ssize_t next = 0, i = 0, size = Py_SIZE(arguments[1]);
    int same = 1;
    if (PyDict_CheckExact(arguments[0])) {
        same = PyDict_GET_SIZE(arguments[0]) == size;
        while (same > 0 && i < size && PyDict_Next(arguments[0], &next, &key, &value)) {
            PyObject *expected = PyTuple_GET_ITEM(arguments[1], i++);
            if (key != expected) /* keys of a class of the user's would run its code */
                same = PyUnicode_CheckExact(key) ? PyUnicode_Compare(key, expected) == 0 : 0;
        }
        return truth(same);
    }
    PyObject *keys = PySequence_Tuple(arguments[0]); /* others, views of classes among them, have an order of their own */
    if (keys != NULL)
        same = PyObject_RichCompareBool(keys, arguments[1], Py_EQ);
    Py_XDECREF(keys);
    return keys == NULL ? NULL : truth(same);
}

static PyObject *any_filled(PyObject *self, PyObject *const *arguments, Py_ssize_t given)
{
    if (given != 1 || !PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "a list of containers");
        return NULL;
    }
    int filled = 0;
    for (Py_ssize_t i = 0; filled == 0 && i < PyList_GET_SIZE(arguments[0]); i++) {
        PyObject *one = PyList_GET_ITEM(arguments[0], i);
        int plain = PyDict_CheckExact(one) || PyODict_CheckExact(one); /* others may say otherwise */
        filled = plain ? PyDict_GET_SIZE(one) > 0 : PyObject_IsTrue(one);
    }
    return truth(filled);
}

#define FUNCTION(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    FUNCTION(entries_are), FUNCTION(holds), FUNCTION(attributes_are), FUNCTION(types_are), FUNCTION(none_in),
    FUNCTION(read_entries), FUNCTION(keys_are), FUNCTION(any_filled),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "thunder_checks", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit_thunder_checks(void) { return PyModule_Create(&definition); }
