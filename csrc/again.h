// A collective that has run before, again (shardsum/group/calls.py), without a line of Python of its own: after a launch the
// interpreter's code and data are out of the caches, and each of its steps costs three times what a loop shows.
#pragma once
#include "python_looks.h"

namespace shardsum {

// The tuple that such a call is made of: what it looks at, tells or calls, then its arguments. Of objects and modules
// their dictionaries, which are read in a third of the time.
enum AgainItem {
  kTensorType,
  kAgreement,
  kEngine,
  kRoute,
  kWire,
  kTraffic,
  kOpen,
  kForwardAd,
  kNoteWrite,
  kLaunch,
  kArguments
};
constexpr int kAgainArguments = 5;

struct Names {
  PyObject *failed, *wary, *call, *last, *own_failed, *sent, *received, *zero;
};

inline const Names& names() {
  static const Names names{PyUnicode_InternFromString("failed"),   PyUnicode_InternFromString("wary"),
                           PyUnicode_InternFromString("call"),     PyUnicode_InternFromString("last"),
                           PyUnicode_InternFromString("_failed"),  PyUnicode_InternFromString("sent"),
                           PyUnicode_InternFromString("received"), PyLong_FromLongLong(0)};
  return names;
}

// Neither the group nor another one on its processes has failed or left a call open.
inline bool may_begin(PyObject* state) {
  const Names& n = names();
  PyObject* agreement = PyTuple_GetItem(state, kAgreement);
  return PyDict_GetItem(agreement, n.failed) == &_Py_NoneStruct &&
         PyDict_GetItem(agreement, n.wary) == &_Py_FalseStruct &&
         PyDict_GetItem(PyTuple_GetItem(state, kWire), n.own_failed) == &_Py_NoneStruct &&
         PyDict_Size(PyTuple_GetItem(state, kOpen)) == 0;
}

// What Engine.begin notes. A call by peers moves no bytes that are counted, so behind one of the same route nothing
// differs.
inline bool note_route(PyObject* state) {
  const Names& n = names();
  PyObject *engine = PyTuple_GetItem(state, kEngine), *route = PyTuple_GetItem(state, kRoute);
  if (PyDict_GetItem(engine, n.last) == route) return true;
  PyObject* traffic = PyTuple_GetItem(state, kTraffic);
  return PyDict_SetItem(engine, n.last, route) == 0 && PyDict_SetItem(traffic, n.sent, n.zero) == 0 &&
         PyDict_SetItem(traffic, n.received, n.zero) == 0;
}

inline bool add_to_calls(PyObject* agreement, long long count) {
  PyObject* call = PyDict_GetItem(agreement, names().call);
  int overflow = 0;
  if (call == nullptr || call->type != &PyLong_Type) return refuse("shardsum: calls are not counted") != nullptr;
  PyObject* next = PyLong_FromLongLong(PyLong_AsLongLongAndOverflow(call, &overflow) + count);
  if (next == nullptr) return false;
  const bool added = PyDict_SetItem(agreement, names().call, next) == 0;
  Py_DecRef(next);
  return added;
}

// again(shard, lengths, out, size, op, scale, out_dtype, grad): True once the call has been launched; False where it is
// another one, or must go the long way for any reason, and nothing has happened.
inline PyObject* again(PyObject* state, PyObject* const* args, std::ptrdiff_t count) {
  if (count != 3 + kAgainArguments) return refuse("shardsum: again takes 8 arguments");
  PyObject *shard = args[0], *lengths = args[1], *out = args[2];
  PyObject* const tensor_type = PyTuple_GetItem(state, kTensorType);
  if (reinterpret_cast<PyObject*>(shard->type) != tensor_type || reinterpret_cast<PyObject*>(out->type) != tensor_type)
    return boolean(false);
  if (lengths->type != &PyList_Type) return boolean(false);
  for (int i = 0; i < kAgainArguments; ++i)
    if (!same_argument(args[3 + i], PyTuple_GetItem(state, kArguments + i))) return boolean(false);
  const int plain = needs_no_grad(PyTuple_GetItem(state, kForwardAd), shard, out);
  if (plain <= 0) return plain == 0 || forgive() ? boolean(false) : nullptr;
  if (!may_begin(state)) return boolean(false);
  PyObject* agreement = PyTuple_GetItem(state, kAgreement);
  if (!add_to_calls(agreement, 1) || !note_route(state)) return nullptr;
  PyObject* launched = PyObject_CallFunctionObjArgs(PyTuple_GetItem(state, kLaunch), out, shard, lengths, nullptr);
  if (launched == nullptr) return nullptr;
  Py_DecRef(launched);
  if (launched != &_Py_TrueStruct) return add_to_calls(agreement, -1) ? boolean(false) : nullptr;
  return note_write(PyTuple_GetItem(state, kNoteWrite), out) ? boolean(true) : nullptr;
}

// make_again(items, ...): the function `again` of such a tuple.
inline PyObject* make_again(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  static PyMethodDef method{"again", &again, METH_FASTCALL, nullptr};
  if (count != 1 || args[0]->type != &PyTuple_Type || PyTuple_Size(args[0]) != kArguments + kAgainArguments)
    return refuse("shardsum: make_again takes a tuple of 15 items");
  return PyCFunction_NewEx(&method, args[0], nullptr);
}

}  // namespace shardsum
