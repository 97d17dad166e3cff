// The operators of shardsum/transports/peer.py: one call of a prepared plan over peer memory (CUDA only).
//
// A plan is a CPU int64 tensor that Python fills in the order in which `read_plan` reads it: everything about a call
// but its tensors and the bounds of its rows. Word 0 is a version, word 1 says whether the plan has run before.
#ifdef SHARDSUM_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <type_traits>

#include "../boxed.h"
#include "peer.h"
#include "../python_calls.h"

extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace shardsum {
namespace {

constexpr int64_t kPlanVersion = 3;
constexpr int kMaxBoundDims = 9;

// Reads a plan word by word.
class Words {
 public:
  explicit Words(const TensorView& plan)
      : next_(static_cast<const int64_t*>(plan.data())), end_(next_ + plan.size(0)) {}
  int64_t take() {
    STD_TORCH_CHECK(next_ < end_, "shardsum: the plan is too short");
    return *next_++;
  }
  template <class T>
  void take(T& to) {
    to = static_cast<T>(take());
  }
  template <class T>
  void take_pointer(T& to) {
    to = reinterpret_cast<T>(take());
  }
  bool at_end() const { return next_ == end_; }

 private:
  const int64_t* next_;
  const int64_t* end_;
};

struct Plan {
  PeerCall call{};
  PeerHost* host;
  bool warm;
  int64_t chunk_elements;
};

double as_double(int64_t bits) {
  double value;
  static_assert(sizeof(value) == sizeof(bits));
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

void read_shape(Words& w, PeerCall& c) {
  int64_t dtype = 0;
  w.take(dtype), c.in_dtype = static_cast<DType>(dtype);
  w.take(dtype), c.out_dtype = static_cast<DType>(dtype);
  w.take(c.in_bytes), w.take(c.out_bytes);
  w.take(c.move), w.take(c.two_shot), w.take(c.push), w.take(c.write), w.take(c.mean), w.take(c.has_scale);
  c.scale = as_double(w.take());
  w.take(c.size), w.take(c.width);
}

void read_tiles(Words& w, PeerCall& c) {
  w.take(c.tile_elements), w.take(c.stretch_elements), w.take(c.stretches_per_tile), w.take(c.warp_columns);
  w.take(c.tiles_per_piece), w.take(c.num_blocks), w.take(c.max_blocks), w.take(c.num_threads);
  w.take(c.producer_warps);
}

void read_memory(Words& w, PeerCall& c) {
  w.take(c.stages_at), w.take(c.abort_at), w.take(c.staging_at), w.take(c.reduced_at);
  w.take(c.staging_bytes), w.take(c.row_bytes), w.take(c.reduced_bytes);
  w.take_pointer(c.control), w.take_pointer(c.failure), w.take_pointer(c.buffers);
  w.take(c.timeout_ns);
}

void read_members(Words& w, PeerCall& c) {
  w.take(c.flag_ranks), w.take(c.num_ranks), w.take(c.num_processes), w.take(c.process), w.take(c.num_sources);
  w.take(c.num_outputs);
  STD_TORCH_CHECK(c.num_ranks <= kPeerMaxRanks && c.num_processes <= kPeerMaxRanks, "shardsum: too many ranks");
  STD_TORCH_CHECK(c.num_sources <= kPeerMaxHosted && c.num_outputs <= kPeerMaxHosted, "shardsum: too many rows");
  for (int g = 0; g < c.num_processes; ++g) w.take_pointer(c.base[g]);
  for (int r = 0; r < c.num_ranks; ++r) {
    w.take(c.owner[r]), w.take(c.place[r]), w.take(c.slot[r]);
    w.take(c.need_begin[r]), w.take(c.need_end[r]);
  }
  for (int i = 0; i < c.num_sources; ++i) w.take(c.sources[i].rank);
  for (int q = 0; q < c.num_outputs; ++q) w.take(c.outputs[q].begin), w.take(c.outputs[q].end);
}

Plan read_plan(Words& w) {
  Plan plan;
  STD_TORCH_CHECK(w.take() == kPlanVersion, "shardsum: this plan is of another version of the library");
  w.take(plan.warm);
  w.take_pointer(plan.host);
  w.take(plan.chunk_elements);
  read_shape(w, plan.call);
  read_tiles(w, plan.call);
  read_memory(w, plan.call);
  read_members(w, plan.call);
  return plan;
}

Plan read_whole_plan(const TensorView& tensor) {
  Words w(tensor);
  const Plan plan = read_plan(w);
  STD_TORCH_CHECK(w.at_end(), "shardsum: the plan is too long");
  return plan;
}

// The symmetric buffer that the row lies in, where peers can read it in whole vectors.
void find_buffer(const PeerCall& c, const PeerHost& host, PeerSource& s) {
  s.buffer = s.offset = 0;
  const auto address = reinterpret_cast<int64_t>(s.data);
  const int64_t position = c.width * c.in_bytes, begin = s.start * position;
  const int64_t last = static_cast<int64_t>(s.start) + s.length, end = (last < c.size ? last : c.size) * position;
  const bool whole = c.device_lengths ? (address | position) % 16 == 0 : (address | begin | end) % 16 == 0;
  for (int64_t i = 0; whole && i < host.num_buffers; ++i) {
    const auto& buffer = host.buffers[i];
    if (address < buffer.begin || address + s.capacity * position > buffer.end) continue;
    if ((address - buffer.begin) / 16 > int64_t{0xffffffff}) continue;
    s.buffer = static_cast<uint32_t>(i + 1);
    s.offset = static_cast<uint32_t>((address - buffer.begin) / 16);
  }
}

void place_source(PeerCall& c, const PeerHost& host, PeerSource& s, const void* data, int64_t positions) {
  s.data = data;
  s.capacity = static_cast<uint32_t>(positions);
  find_buffer(c, host, s);
  c.stages |= s.buffer == 0;
}

int64_t bytes_from(const TensorView& tensor, int64_t leading) {
  return tensor.width(leading) * static_cast<int64_t>(aoti_torch_dtype_element_size(tensor.dtype_code()));
}

void set_source(PeerCall& c, const PeerHost& host, int i, const TensorView& shard, int64_t start, int64_t length) {
  PeerSource& s = c.sources[i];
  STD_TORCH_CHECK(shard.dim() >= 1 && shard.is_contiguous() && bytes_from(shard, 1) == c.width * c.in_bytes,
                  "shardsum: shard ", i, " does not fit the plan");
  STD_TORCH_CHECK(start >= 0 && length >= 0 && length <= shard.size(0), "shardsum: bounds of shard ", i);
  s.start = static_cast<uint32_t>(start);
  s.length = static_cast<uint32_t>(length);
  place_source(c, host, s, shard.data(), shard.size(0));
}

void set_output(PeerCall& c, int q, const TensorView& out) {
  const int64_t length = int64_t{c.outputs[q].end} - c.outputs[q].begin;
  STD_TORCH_CHECK(out.is_contiguous() && bytes_from(out, 0) == length * c.width * c.out_bytes, "shardsum: output ", q,
                  " does not fit the plan");
  c.outputs[q].data = out.mutable_data();
}

void enqueue(Plan& plan, int32_t device) {
  STD_TORCH_CHECK(plan.call.failure->kind == 0, "shardsum: the peer transport of this group has failed");
  int current = -1;
  STD_TORCH_CHECK(current_cuda_device(&current) == 0, "shardsum: no current CUDA device");
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (current != device) guard.emplace(device);
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream), "current CUDA stream");
  const int error = peer_enqueue(plan.call, plan.chunk_elements, plan.warm, *plan.host, stream);
  STD_TORCH_CHECK(error != kPeerNotWarm,
                  "shardsum: a call over peer memory can be captured in a CUDA graph once it has run before with the "
                  "same signature, on every process; make one eager call first");
  STD_TORCH_CHECK(error == 0, "shardsum: CUDA error ", error, " at a launch over peer memory");
  plan.warm = true;
}

// A plan of one source and one output with all that its calls have in common, in the memory of a tensor: ready to
// launch. `lengths` are what it is known by; they are compared, no more.
struct BoundPlan {
  int64_t version = kPlanVersion;
  int64_t device;
  int64_t dtype, out_dtype;  // PyTorch's
  int64_t dim, trailing[kMaxBoundDims - 1];
  int64_t num_lengths, lengths[kPeerMaxRanks];
  Plan plan;
};

// peer_bind(Tensor plan, int start, int length, int[] lengths, Tensor out, Tensor shard) -> Tensor
void peer_bind(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg tensor(stack[0]), out_arg(stack[4]), shard_arg(stack[5]);
  const IntListArg lengths(stack[3]);
  const TensorView out = out_arg.view(), shard = shard_arg.view();
  BoundPlan bound{};
  bound.plan = read_whole_plan(tensor.view());
  STD_TORCH_CHECK(bound.plan.call.num_sources == 1 && bound.plan.call.num_outputs == 1,
                  "shardsum: the plan has several rows");
  const auto start = torch::stable::detail::to<int64_t>(stack[1]),
             length = torch::stable::detail::to<int64_t>(stack[2]);
  STD_TORCH_CHECK(start >= 0 && length >= 0, "shardsum: bounds of the shard");
  STD_TORCH_CHECK(shard.dim() >= 1 && shard.dim() <= kMaxBoundDims, "shardsum: too many dimensions to bind");
  STD_TORCH_CHECK(lengths.size() <= kPeerMaxRanks, "shardsum: too many lengths");
  bound.plan.call.sources[0].start = static_cast<uint32_t>(start);
  bound.plan.call.sources[0].length = static_cast<uint32_t>(length);
  bound.device = shard.device_index(), bound.dtype = shard.dtype_code(), bound.out_dtype = out.dtype_code();
  bound.dim = shard.dim(), bound.num_lengths = lengths.size();
  std::copy(shard.sizes() + 1, shard.sizes() + shard.dim(), bound.trailing);
  std::copy(lengths.data(), lengths.data() + lengths.size(), bound.lengths);
  static_assert(sizeof(BoundPlan) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<BoundPlan>);
  const int64_t words = sizeof(BoundPlan) / sizeof(int64_t), stride = 1;
  AtenTensorHandle handle = nullptr;
  check(
      aoti_torch_empty_strided(1, &words, &stride, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &handle),
      "empty");
  TensorArg result(torch::stable::detail::from(handle));
  __builtin_memcpy(result.view().mutable_data(), &bound, sizeof(bound));
  stack[0] = result.release();
}

// Whether a call with other tensors than those that were bound can be launched all the same: they are contiguous on the
// GPU, of the same dtypes and trailing shape, `out` has the result's positions.
bool fits(const BoundPlan& bound, const TensorView& out, const TensorView& shard) {
  for (const TensorView* t : {&out, &shard}) {
    if (t->device_type() != aoti_torch_device_type_cuda() || t->device_index() != bound.device) return false;
    if (t->dim() != bound.dim || !t->is_contiguous()) return false;
    if (!std::equal(t->sizes() + 1, t->sizes() + t->dim(), bound.trailing)) return false;
  }
  if (shard.dtype_code() != bound.dtype || out.dtype_code() != bound.out_dtype) return false;
  const PeerCall& c = bound.plan.call;
  return out.size(0) == int64_t{c.outputs[0].end} - c.outputs[0].begin && shard.size(0) >= int64_t{c.sources[0].length};
}

thread_local BoundPlan* pending_plan = nullptr;

// peer_run_bound(Tensor(a!) out, Tensor shard) -> bool, called by launch_bound alone. Only addresses are set. False,
// and nothing has happened: the tensors do not fit.
void peer_run_bound(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), shard_arg(stack[1]);
  STD_TORCH_CHECK(pending_plan != nullptr, "shardsum: this operator is not called by itself");
  BoundPlan& bound = *pending_plan;
  pending_plan = nullptr;
  const TensorView out = out_arg.view(), shard = shard_arg.view();
  bool run = fits(bound, out, shard);
  if (run) {
    PeerCall& c = bound.plan.call;
    const void* data = shard.data();
    c.outputs[0].data = out.mutable_data();
    run = !overlap(data, shard.size(0) * c.width * c.in_bytes, c.outputs[0].data, out.size(0) * c.width * c.out_bytes);
    c.stages = false;
    place_source(c, *bound.plan.host, c.sources[0], data, shard.size(0));
    if (run) enqueue(bound.plan, static_cast<int32_t>(bound.device));
  }
  stack[0] = torch::stable::detail::from(run);
}

// launch(out, shard, lengths) of bind_launch: the operator's result, or False where `lengths`, a list of ints, are not
// those that were bound. None: they are known to be.
PyObject* launch_bound(PyObject* self, PyObject* const* args, std::ptrdiff_t count) {
  int overflow = 0;
  if (count != 3) return refuse("shardsum: a launch takes out, shard and lengths");
  auto* bound = reinterpret_cast<BoundPlan*>(PyLong_AsLongLongAndOverflow(PyTuple_GetItem(self, 1), &overflow));
  if (args[2] != &_Py_NoneStruct) {
    if (args[2]->type != &PyList_Type || PyList_Size(args[2]) != bound->num_lengths) return boolean(false);
    Table<int64_t, kPeerMaxRanks> lengths(bound->num_lengths);
    if (!read_ints(args[2], lengths)) return boolean(false);
    if (!std::equal(bound->lengths, bound->lengths + bound->num_lengths, lengths.data())) return boolean(false);
  }
  pending_plan = bound;
  PyObject* result = PyObject_CallFunctionObjArgs(PyTuple_GetItem(self, 0), args[0], args[1], nullptr);
  pending_plan = nullptr;
  return result;
}

// bind_launch((peer_run_bound, address, owner)): the function above of what peer_bind made, at this address as long as
// its owner lives.
PyObject* bind_launch(PyObject*, PyObject* const* args, std::ptrdiff_t count) {
  static PyMethodDef method{"launch", &launch_bound, METH_FASTCALL, nullptr};
  int overflow = 0;
  if (count != 1 || args[0]->type != &PyTuple_Type || PyTuple_Size(args[0]) != 3 ||
      PyTuple_GetItem(args[0], 1)->type != &PyLong_Type)
    return refuse("shardsum: bind_launch takes a tuple of an operator, an address and its owner");
  const auto* bound =
      reinterpret_cast<BoundPlan*>(PyLong_AsLongLongAndOverflow(PyTuple_GetItem(args[0], 1), &overflow));
  if (overflow != 0 || bound == nullptr || bound->version != kPlanVersion)
    return refuse("shardsum: this is not a bound plan of this version of the library");
  return PyCFunction_NewEx(&method, args[0], nullptr);
}

const void* device_bounds(const std::optional<TensorArg>& values, PeerCall& c) {
  if (!values) return nullptr;
  const TensorView view = values->view();
  const int32_t code = view.dtype_code();
  c.index64 = code == aoti_torch_dtype_int64();
  STD_TORCH_CHECK(c.index64 || code == aoti_torch_dtype_int32(), "shardsum: lengths are neither int32 nor int64");
  STD_TORCH_CHECK(view.is_contiguous() && view.width(0) == c.num_sources, "shardsum: one length a shard");
  STD_TORCH_CHECK(view.device_type() == aoti_torch_device_type_cuda(), "shardsum: lengths are not on the device");
  return view.data();
}

// peer_run(Tensor(a!)[] outs, Tensor[] shards, int[] bounds, Tensor? starts, Tensor? lengths, Tensor plan)
// bounds: start and length of each shard; ignored where lengths is given (starts: None means 0, else lengths' dtype).
void peer_run(StableIValue* stack, uint64_t, uint64_t) {
  TensorListArg outs(stack[0]), shards(stack[1]);
  IntListArg bounds(stack[2]);
  std::optional<TensorArg> starts, lengths;
  if (const auto handle = take_optional(stack[3])) starts.emplace(*handle);
  if (const auto handle = take_optional(stack[4])) lengths.emplace(*handle);
  const TensorArg tensor(stack[5]);
  Plan plan = read_whole_plan(tensor.view());
  PeerCall& c = plan.call;
  STD_TORCH_CHECK(shards.size() == c.num_sources && outs.size() == c.num_outputs, "shardsum: the plan has other rows");
  c.device_starts = device_bounds(starts, c);
  c.device_lengths = device_bounds(lengths, c);
  STD_TORCH_CHECK(c.device_lengths || bounds.size() == 2 * c.num_sources, "shardsum: start and length of each shard");
  for (int i = 0; i < c.num_sources; ++i) {
    const bool on_device = c.device_lengths != nullptr;
    set_source(c, *plan.host, i, shards[i], on_device ? 0 : bounds[2 * i], on_device ? 0 : bounds[2 * i + 1]);
  }
  for (int q = 0; q < c.num_outputs; ++q) set_output(c, q, outs[q]);
  enqueue(plan, shards[0].device_index());
  static_cast<int64_t*>(tensor.view().mutable_data())[1] = 1;
}

}  // namespace
}  // namespace shardsum

STABLE_TORCH_LIBRARY_IMPL(shardsum, CUDA, m) {
  if (aoti_torch_get_current_cuda_stream == nullptr) return;
  m.impl("peer_bind", &shardsum::peer_bind);
  m.impl("peer_run_bound", &shardsum::peer_run_bound);
  m.impl("peer_run", &shardsum::peer_run);
}

// For shardsum/native/loader.py, as those of bindings.cpp.
extern "C" __attribute__((visibility("default"), used)) PyObject* shardsum_bind_launch() {
  static PyMethodDef method{"bind_launch", &shardsum::bind_launch, METH_FASTCALL, nullptr};
  return PyCFunction_NewEx(&method, nullptr, nullptr);
}
#endif
