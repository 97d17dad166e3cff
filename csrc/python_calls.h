// What Python calls past the dispatcher: the arguments of an operator that are no tensors.
//
// An int costs the dispatcher 0.3 us, a list of four 0.8, and Python's own look at such a list as much. So they are
// read here and lie beside the call: the operators of checked.h take tensors alone, and find the rest in `Pending` of
// their thread. An operator takes it before it does anything, and it is gone when the call returns or raises: what
// Python runs amid a call (a mode, a signal's handler) finds its own arguments or none, and none is an error.
#pragma once
#include "boxed.h"
#include "python.h"
#include "row_table.h"
#include "table.h"

namespace shardsum {

struct Pending {
  const int64_t* lengths = nullptr;  // null: they come in a tensor
  int64_t num_lengths = 0;
  int64_t size = -1;
  Finish finish;
};

inline thread_local const Pending* pending = nullptr;

inline Pending take_pending() {
  STD_TORCH_CHECK(pending != nullptr, "shardsum: this operator is not called by itself");
  const Pending taken = *pending;
  pending = nullptr;
  return taken;
}

// Whether it is a list, of no more items than anybody has ranks: there is room to read them.
inline bool is_list(PyObject* object) { return object->type == &PyList_Type && PyList_Size(object) <= 1 << 20; }

// Reads a list of ints: False where anything else is there, also True and 8.0, which an int64_t would take. Nobody
// writes to the list meanwhile: no Python runs.
template <class Values>
bool read_ints(PyObject* list, Values& values) {
  for (int64_t i = 0; i < values.size(); ++i) {
    PyObject* value = PyList_GetItem(list, i);
    if (value->type != &PyLong_Type) return false;
    int overflow = 0;
    values[i] = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow != 0) return false;
  }
  return true;
}

inline PyObject* refuse(const char* why) {
  PyErr_SetString(PyExc_RuntimeError, why);
  return nullptr;
}

inline PyObject* boolean(bool value) {
  PyObject* object = value ? &_Py_TrueStruct : &_Py_FalseStruct;
  Py_IncRef(object);
  return object;
}

// are_plain(sequence, type, name): whether all items are of exactly this type, and their attribute is False (with name
// None nobody asks).
inline PyObject* are_plain(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  if (count != 3) return refuse("shardsum: are_plain takes 3 arguments");
  const std::ptrdiff_t size = PySequence_Size(args[0]);
  bool plain = true;
  for (std::ptrdiff_t i = 0; plain && i < size; ++i) {
    PyObject* item = PySequence_GetItem(args[0], i);
    if (item == nullptr) return nullptr;
    plain = reinterpret_cast<PyObject*>(item->type) == args[1];
    if (plain && args[2] != &_Py_NoneStruct) {
      PyObject* value = PyObject_GetAttr(item, args[2]);
      if (value == nullptr) {
        Py_DecRef(item);
        return nullptr;
      }
      plain = value == &_Py_FalseStruct;
      Py_DecRef(value);
    }
    Py_DecRef(item);
  }
  return size < 0 ? nullptr : boolean(plain);
}

// call_with(operator, lengths, size, mean, scale, tensor, second = none): the operator's result.
//   lengths: a list of ints, or None; anything else is the operator's last tensor. size: an int. mean: a bool.
//   scale: a float or None.
inline PyObject* call_with(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  if (count != 6 && count != 7) return refuse("shardsum: call_with takes 6 or 7 arguments");
  PyObject *lengths = args[1], *scale = args[4], *tensors[3] = {args[5], nullptr, nullptr};
  if (count == 7) tensors[1] = args[6];
  const bool listed = is_list(lengths);
  if (!listed && lengths != &_Py_NoneStruct) tensors[count - 5] = lengths;
  Table<int64_t> values(listed ? PyList_Size(lengths) : 0);
  if (listed && !read_ints(lengths, values)) return refuse("shardsum: lengths are not plain ints");
  Pending call;
  if (listed) call.lengths = values.data(), call.num_lengths = values.size();
  int overflow = 0;
  if (args[2]->type != &PyLong_Type) return refuse("shardsum: size is not an int");
  call.size = PyLong_AsLongLongAndOverflow(args[2], &overflow);
  if (overflow != 0) return refuse("shardsum: size is too large");
  call.finish.mean = args[3] == &_Py_TrueStruct;
  if (scale != &_Py_NoneStruct) {
    if (scale->type != &PyFloat_Type) return refuse("shardsum: scale is not a float");
    call.finish.has_scale = true;
    call.finish.scale = PyFloat_AsDouble(scale);
  }
  pending = &call;
  PyObject* result = PyObject_CallFunctionObjArgs(args[0], tensors[0], tensors[1], tensors[2], nullptr);
  pending = nullptr;
  return result;
}

// pack(list): its ints as bytes, 8 each; None where it is no list of plain ints, or a very long one. Tells lists apart
// as == would not.
inline PyObject* pack(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  if (count != 1) return refuse("shardsum: pack takes 1 argument");
  if (is_list(args[0])) {
    Table<int64_t> values(PyList_Size(args[0]));
    if (read_ints(args[0], values))
      return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  }
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

}  // namespace shardsum
