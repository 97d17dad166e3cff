// How again.h and usual.h look at a call's arguments, and tell autograd of what they wrote.
//
// An attribute of a tensor may run Python: a mode's, which may do anything. So lists, and what a group
// stands at, are read after all attributes.
#pragma once
#include "python_calls.h"

namespace shardsum {

inline PyObject* new_reference(PyObject* object) {
  Py_IncRef(object);
  return object;
}

// Equal and of the same type, for what equals only its like; False for most else, which is no error.
inline bool same_argument(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (a->type != b->type) return false;
  if (a->type == &PyUnicode_Type) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
  if (a->type != &PyLong_Type) return false;
  int overflows[2] = {};
  const long long values[2] = {PyLong_AsLongLongAndOverflow(a, &overflows[0]),
                               PyLong_AsLongLongAndOverflow(b, &overflows[1])};
  return overflows[0] == 0 && overflows[1] == 0 && values[0] == values[1];
}

// Whether an attribute is that very object: 1, 0, or -1 with an error, as of a mode whose Python runs here.
inline int attribute_is(PyObject* object, PyObject* name, const PyObject* expected) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) return -1;
  Py_DecRef(value);  // whoever else holds it still does: only its address counts
  return value == expected;
}

// Clears the pending error where the long way meets it again, if it is one: false for all others, as an interrupt.
inline bool forgive() {
  if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && !PyErr_ExceptionMatches(PyExc_TypeError) &&
      !PyErr_ExceptionMatches(PyExc_AttributeError))
    return false;
  PyErr_Clear();
  return true;
}

// Whether no gradient or tangent is wanted of `x`, and none would be lost by writing to `out` (`x` where nothing is
// written); as attribute_is.
inline int needs_no_grad(PyObject* forward_ad, PyObject* x, PyObject* out) {
  static PyObject* const current_level = PyUnicode_InternFromString("_current_level");
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  PyObject* level = PyDict_GetItem(forward_ad, current_level);
  int overflow = 0;
  if (level == nullptr || level->type != &PyLong_Type || PyLong_AsLongLongAndOverflow(level, &overflow) >= 0) return 0;
  const int fixed = out == x ? 1 : attribute_is(out, requires_grad, &_Py_FalseStruct);
  if (fixed <= 0) return fixed;
  return aoti_torch_grad_mode_is_enabled() ? attribute_is(x, requires_grad, &_Py_FalseStruct) : 1;
}

// Autograd must notice when it has saved the values that a kernel overwrote.
inline bool note_write(PyObject* increment_version, PyObject* out) {
  PyObject* written = PyTuple_Pack(1, out);
  if (written == nullptr) return false;
  PyObject* noted = PyObject_CallFunctionObjArgs(increment_version, written, nullptr);
  Py_DecRef(written);
  if (noted != nullptr) Py_DecRef(noted);
  return noted != nullptr;
}

}  // namespace shardsum
