// The part of CPython's stable ABI (3.10 and later) that python_calls.h uses, declared here since Python's own headers
// are not installed everywhere where Python is. Not for builds whose objects look different (free-threaded, or tracing
// references): shardsum/native/loader.py does not ask for the functions there.
#pragma once
#include <cstddef>

extern "C" {
struct PyTypeObject;
struct PyObject {
  std::ptrdiff_t reference_count;
  PyTypeObject* type;
};
using PyFastFunction = PyObject* (*)(PyObject* self, PyObject* const* arguments, std::ptrdiff_t count);
struct PyMethodDef {
  const char* name;
  PyFastFunction function;
  int flags;
  const char* documentation;
};
constexpr int METH_FASTCALL = 0x80;

constexpr int Py_EQ = 2;

extern PyTypeObject PyList_Type, PyLong_Type, PyFloat_Type, PyUnicode_Type, PyTuple_Type;
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyExc_RuntimeError, *PyExc_TypeError, *PyExc_AttributeError;

PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
PyObject* PyObject_CallFunctionObjArgs(PyObject* callable, ...);
PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
int PyObject_RichCompareBool(PyObject* a, PyObject* b, int operation);
PyObject* PyBytes_FromStringAndSize(const char* data, std::ptrdiff_t size);
PyObject* PyUnicode_InternFromString(const char* text);
PyObject* PyList_GetItem(PyObject* list, std::ptrdiff_t index);  // borrowed
std::ptrdiff_t PyList_Size(PyObject* list);
PyObject* PyTuple_GetItem(PyObject* tuple, std::ptrdiff_t index);  // borrowed
PyObject* PyTuple_Pack(std::ptrdiff_t size, ...);
std::ptrdiff_t PyTuple_Size(PyObject* tuple);
std::ptrdiff_t PyDict_Size(PyObject* dict);
PyObject* PyDict_GetItem(PyObject* dict, PyObject* key);  // borrowed; null without an error where there is none
int PyDict_SetItem(PyObject* dict, PyObject* key, PyObject* value);
PyObject* PySequence_GetItem(PyObject* sequence, std::ptrdiff_t index);
std::ptrdiff_t PySequence_Size(PyObject* sequence);
long long PyLong_AsLongLongAndOverflow(PyObject* value, int* overflow);
PyObject* PyLong_FromLongLong(long long value);
double PyFloat_AsDouble(PyObject* value);
void PyErr_Clear();
int PyErr_ExceptionMatches(PyObject* type);
void PyErr_SetString(PyObject* type, const char* message);
void Py_IncRef(PyObject* object);
void Py_DecRef(PyObject* object);
}
