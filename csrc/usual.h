// The usual ragged_sum (shardsum/local/usual.py) without a line of Python between the user's call and the dispatcher.
#pragma once
#include "python_looks.h"

namespace shardsum {

// The tuple that the function is made of.
enum UsualItem { kUsualTensor, kUsualForwardAd, kUsualNoteWrite, kInto, kIntoLengths, kNew, kNewLengths, kUsualItems };

// The call's numbers; false where one is not what it usually is.
inline bool read_numbers(PyObject* size, PyObject* op, PyObject* scale, Pending& call) {
  static PyObject* const sum = PyUnicode_InternFromString("sum");
  static PyObject* const mean = PyUnicode_InternFromString("mean");
  call.finish.mean = same_argument(op, mean);
  if (!call.finish.mean && !same_argument(op, sum)) return false;
  if (scale != &_Py_NoneStruct) {
    if (scale->type != &PyFloat_Type) return false;  // a tensor's gradient would be lost
    call.finish.has_scale = true;
    call.finish.scale = PyFloat_AsDouble(scale);
  }
  if (size == &_Py_NoneStruct) return true;
  int overflow = 0;
  if (size->type != &PyLong_Type) return false;
  call.size = PyLong_AsLongLongAndOverflow(size, &overflow);
  return overflow == 0 && call.size >= 0;
}

// usual_sum(x, lengths, size, op, scale, out_dtype, out): the result (`out`, where given), or None where anything is
// unusual or wrong.
inline PyObject* usual_sum(PyObject* state, PyObject* const* args, std::ptrdiff_t count) {
  if (count != 7) return refuse("shardsum: usual_sum takes 7 arguments");
  PyObject *x = args[0], *lengths = args[1], *out = args[6], *const none = &_Py_NoneStruct;
  const auto item = [state](int i) { return PyTuple_GetItem(state, i); };
  const auto is_tensor = [&](PyObject* o) { return reinterpret_cast<PyObject*>(o->type) == item(kUsualTensor); };
  static PyObject* const is_cpu = PyUnicode_InternFromString("is_cpu");
  const bool listed = is_list(lengths), allocates = out == none;
  Pending call;
  if (!is_tensor(x) || args[5] != none || !(allocates || is_tensor(out)) || !(listed || is_tensor(lengths)) ||
      !read_numbers(args[2], args[3], args[4], call))
    return new_reference(none);
  int plain = needs_no_grad(item(kUsualForwardAd), x, allocates ? x : out);
  if (plain > 0 && !listed) plain = attribute_is(lengths, is_cpu, &_Py_TrueStruct);
  Table<int64_t> values(listed ? PyList_Size(lengths) : 0);
  if (plain > 0 && listed) plain = read_ints(lengths, values);
  if (plain <= 0) return plain == 0 || forgive() ? new_reference(none) : nullptr;
  if (listed) call.lengths = values.data(), call.num_lengths = values.size();
  PyObject* tensors[4] = {};
  int n = 0;
  if (!allocates) tensors[n++] = out;
  tensors[n++] = x;
  if (!listed) tensors[n++] = lengths;
  PyObject* op = item(allocates ? (listed ? kNew : kNewLengths) : (listed ? kInto : kIntoLengths));
  pending = &call;
  PyObject* result = PyObject_CallFunctionObjArgs(op, tensors[0], tensors[1], tensors[2], nullptr);
  pending = nullptr;
  if (result == nullptr) return forgive() ? new_reference(none) : nullptr;
  if (allocates) return result;
  Py_DecRef(result);
  return note_write(item(kUsualNoteWrite), out) ? new_reference(out) : nullptr;
}

// make_usual_sum(items): the function `usual_sum` of such a tuple.
inline PyObject* make_usual_sum(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  static PyMethodDef method{"usual_sum", &usual_sum, METH_FASTCALL, nullptr};
  if (count != 1 || args[0]->type != &PyTuple_Type || PyTuple_Size(args[0]) != kUsualItems)
    return refuse("shardsum: make_usual_sum takes a tuple of 7 items");
  return PyCFunction_NewEx(&method, args[0], nullptr);
}

}  // namespace shardsum
