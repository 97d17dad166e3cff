// The operators of shardsum/transports/peer/operators.py: calls over peer memory, described by plans. Protocol:
// docs/engineering/peer.md.
//
// peer_run takes any number of rows, with bounds on the host or on the device, and reads its plan word by word
// (plan.h). peer_bind makes of such a plan, for bounds that do not change, the plan of peer_call (one row, one output)
// and peer_call_new: all that is common to such calls, ready to launch, in the memory of a CPU int64 tensor. These
// check their tensors against it and set addresses, nothing else. They are built for the CPU as well, where all checks
// are made and nothing can be launched.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../sums.h"
#include "plan.h"

namespace shardsum {
namespace {

constexpr int kMaxRowDims = 15;  // of one position of a bound plan's tensors

// The state of a group, an int64 in memory that Python and this library share (shardsum/transports/peer/operators.py).
constexpr int64_t kStateFailed = int64_t{1} << 62;  // its transport has failed
constexpr int64_t kStateNumber = (int64_t{1} << 48) - 1;

// Reads a plan word by word.
class Words {
 public:
  explicit Words(const TensorView& plan)
      : next_(static_cast<const int64_t*>(plan.data())), end_(next_ + plan.size(0)) {}
  int64_t take() {
    SHARDSUM_CHECK(next_ < end_, "the plan is too short");
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

bool is_plan_tensor(const TensorView& t) {
  return t.device_type() == aoti_torch_device_type_cpu() && t.dtype_code() == aoti_torch_dtype_int64() &&
         t.dim() == 1 && t.is_contiguous();
}

Plan read_whole_plan(const TensorView& tensor) {
  SHARDSUM_CHECK(is_plan_tensor(tensor), "a plan is a contiguous CPU int64 tensor of one dimension");
  Words w(tensor);
  const Plan plan = read_plan(w);
  SHARDSUM_CHECK(w.at_end(), "the plan is too long");
  return plan;
}

int64_t bytes_from(const TensorView& tensor, int64_t leading) {
  return tensor.width(leading) * static_cast<int64_t>(aoti_torch_dtype_element_size(tensor.dtype_code()));
}

void set_source(PeerCall& c, int i, const TensorView& shard, int64_t start, int64_t length) {
  PeerSource& s = c.sources[i];
  SHARDSUM_CHECK(shard.dim() >= 1 && shard.is_contiguous() && bytes_from(shard, 1) == c.width * c.in_bytes, "shard ", i,
                 " does not fit the plan");
  SHARDSUM_CHECK(start >= 0 && length >= 0 && length <= shard.size(0), "bounds of shard ", i);
  s.start = static_cast<uint32_t>(start);
  s.length = static_cast<uint32_t>(length);
  s.data = shard.data(), s.capacity = static_cast<uint32_t>(shard.size(0));
}

void set_output(PeerCall& c, int q, const TensorView& out) {
  const int64_t length = int64_t{c.outputs[q].end} - c.outputs[q].begin;
  SHARDSUM_CHECK(out.is_contiguous() && bytes_from(out, 0) == length * c.width * c.out_bytes, "output ", q,
                 " does not fit the plan");
  c.outputs[q].data = out.mutable_data();
}

// Throws where nothing has been launched: what is wrong is said before `launched` is set.
void enqueue(Plan& plan, int32_t device, bool& launched) {
#ifdef SHARDSUM_WITH_CUDA
  int current = -1;
  SHARDSUM_CHECK(current_cuda_device(&current) == 0, "no current CUDA device");
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  if (current != device) guard.emplace(device);
  void* stream = nullptr;
  check(aoti_torch_get_current_cuda_stream(device, &stream), "current CUDA stream");
  const int error = peer_enqueue(plan.call, plan.chunk_elements, plan.warm, *plan.host, stream);
  SHARDSUM_CHECK(error != kPeerNotWarm,
                 "a call over peer memory can be captured in a CUDA graph once it has run before with the "
                 "same signature, on every process; make one eager call first");
  launched = true;
  SHARDSUM_CHECK(error == 0, "CUDA error ", error, " at a launch over peer memory");
  plan.warm = true;
#else
  SHARDSUM_CHECK(false, "this library was built without CUDA");
#endif
}

void check_alive(const PeerCall& call) {
  SHARDSUM_CHECK(call.failure->kind == 0, "the peer transport of this group has failed");
}

// ---- bounds that do not change -------------------------------------------------------------------------------------
struct BoundPlan {
  int64_t version = kPlanVersion;
  int64_t* state;  // of the group; or null
  int64_t device_type, device;
  int64_t dtype, out_dtype;  // PyTorch's
  int64_t dim;               // of all tensors: (positions, *row)
  int64_t row[kMaxRowDims];  // dim - 1 sizes
  Plan plan;
  int64_t out_positions(int q) const { return int64_t{plan.call.outputs[q].end} - plan.call.outputs[q].begin; }
};
static_assert(sizeof(BoundPlan) % sizeof(int64_t) == 0 && std::is_trivially_copyable_v<BoundPlan>);
constexpr int64_t kBoundWords = sizeof(BoundPlan) / sizeof(int64_t);

void set_row_shape(BoundPlan& b, const IntListArg& row) {
  SHARDSUM_CHECK(row.size() <= kMaxRowDims, "a position of ", row.size(), " dimensions cannot be bound");
  int64_t width = 1;
  for (int64_t d = 0; d < row.size(); ++d) width *= b.row[d] = row[d];
  b.dim = row.size() + 1;
  const int64_t row_bytes = width * static_cast<int64_t>(aoti_torch_dtype_element_size(b.dtype));
  SHARDSUM_CHECK(row_bytes == b.plan.call.width * b.plan.call.in_bytes, "the plan has another row shape");
}

// peer_bind(Tensor plan, int[] bounds, int[] row_shape, Tensor shard, Tensor out, int state) -> Tensor
// bounds: start and length of each row. Of shard and out only dtype and device are used.
void peer_bind(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg tensor(stack[0]), shard_arg(stack[3]), out_arg(stack[4]);
  const IntListArg bounds(stack[1]), row(stack[2]);
  const TensorView shard = shard_arg.view();
  BoundPlan b{};
  b.plan = read_whole_plan(tensor.view());
  PeerCall& c = b.plan.call;
  SHARDSUM_CHECK(c.num_sources > 0 && bounds.size() == 2 * c.num_sources, "start and length of each shard");
  b.state = reinterpret_cast<int64_t*>(torch::stable::detail::to<int64_t>(stack[5]));
  b.device_type = shard.device_type(), b.device = shard.device_index();
  b.dtype = shard.dtype_code(), b.out_dtype = out_arg.view().dtype_code();
  set_row_shape(b, row);
  for (int i = 0; i < c.num_sources; ++i) {
    const int64_t start = bounds[2 * i], length = bounds[2 * i + 1];
    SHARDSUM_CHECK(start >= 0 && length >= 0 && start + length <= c.size, "bounds of shard ", i);
    c.sources[i].start = static_cast<uint32_t>(start);
    c.sources[i].length = static_cast<uint32_t>(length);
  }
  const int64_t words = kBoundWords, stride = 1;
  AtenTensorHandle handle = nullptr;
  check(
      aoti_torch_empty_strided(1, &words, &stride, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &handle),
      "empty");
  TensorArg result(torch::stable::detail::from(handle));
  std::memcpy(result.view().mutable_data(), static_cast<const void*>(&b), sizeof(b));
  stack[0] = result.release();
}

BoundPlan& bound_plan(const TensorArg& arg) {
  const TensorView tensor = arg.view();
  SHARDSUM_CHECK(is_plan_tensor(tensor) && tensor.size(0) == kBoundWords, "plan is not one of peer_bind");
  auto& b = *static_cast<BoundPlan*>(tensor.mutable_data());
  SHARDSUM_CHECK(b.version == kPlanVersion, "this plan is of another version of the library");
  return b;
}

void check_single(const BoundPlan& b) {
  SHARDSUM_CHECK(b.plan.call.num_sources == 1 && b.plan.call.num_outputs == 1, "the plan has several rows");
}

void check_state(const BoundPlan& b) {
  if (b.state == nullptr) return;
  SHARDSUM_CHECK((*b.state & kStateFailed) == 0, "the group has failed or was closed");
}

void check_fits(const BoundPlan& b, const TensorView& t, int64_t dtype, const char* name) {
  SHARDSUM_CHECK(t.device_type() == b.device_type && t.device_index() == b.device, name,
                 " is not on the device of its plan");
  SHARDSUM_CHECK(t.dtype_code() == dtype, name, " has another dtype than its plan");
  SHARDSUM_CHECK(t.dim() == b.dim && std::equal(t.sizes() + 1, t.sizes() + t.dim(), b.row), name,
                 " has another shape than its plan");
  SHARDSUM_CHECK(t.is_contiguous(), name, " is not contiguous");
}

// Checks the i-th shard and sets its address.
void take_shard(BoundPlan& b, int i, const TensorView& shard) {
  check_fits(b, shard, b.dtype, "shard");
  PeerSource& s = b.plan.call.sources[i];
  SHARDSUM_CHECK(shard.size(0) >= s.length, "shard has ", shard.size(0), " positions, its plan ", s.length);
  s.data = shard.data(), s.capacity = static_cast<uint32_t>(shard.size(0));
}

// The same of the only output.
void take_out(BoundPlan& b, const TensorView& out) {
  check_fits(b, out, b.out_dtype, "out");
  PeerCall& c = b.plan.call;
  const int64_t positions = b.out_positions(0);
  SHARDSUM_CHECK(out.size(0) == positions, "out has ", out.size(0), " positions, its plan ", positions);
  c.outputs[0].data = out.mutable_data();
  SHARDSUM_CHECK(!overlap(c.sources[0].data, c.sources[0].capacity * c.width * c.in_bytes, c.outputs[0].data,
                          positions * c.width * c.out_bytes),
                 "out shares memory with shard");
}

// A new q-th output, its address set.
StableIValue new_out(BoundPlan& b, int q, const TensorView& like) {
  int64_t sizes[1 + kMaxRowDims] = {b.out_positions(q)};
  std::copy(b.row, b.row + b.dim - 1, sizes + 1);
  TensorArg out(empty_on(like, sizes, b.dim, static_cast<int32_t>(b.out_dtype)));
  b.plan.call.outputs[q].data = out.view().mutable_data();
  return out.release();
}

// Launches and counts the call, all addresses being set.
void launch(BoundPlan& b) {
  PeerCall& c = b.plan.call;
  SHARDSUM_CHECK(b.device_type != aoti_torch_device_type_cpu(), "peer memory is memory of GPUs");
  const bool dead = c.failure->kind != 0;
  if (dead && b.state != nullptr) *b.state |= kStateFailed;
  check_alive(c);
  const int64_t number = b.state == nullptr ? 0 : (*b.state + 1) & kStateNumber;
  c.number = static_cast<uint32_t>(number);
  bool launched = false;
  try {
    enqueue(b.plan, static_cast<int32_t>(b.device), launched);
  } catch (...) {
    if (launched && b.state != nullptr) *b.state |= kStateFailed;
    throw;
  }
  if (b.state != nullptr) *b.state = (*b.state & ~kStateNumber) | number;
}

// peer_call(Tensor(a!) out, Tensor shard, Tensor plan) -> ()
void peer_call(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), shard_arg(stack[1]), plan(stack[2]);
  BoundPlan& b = bound_plan(plan);
  check_single(b);
  check_state(b);
  take_shard(b, 0, shard_arg.view());
  take_out(b, out_arg.view());
  launch(b);
}

// peer_call_new(Tensor shard, Tensor plan) -> Tensor
void peer_call_new(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg shard_arg(stack[0]), plan(stack[1]);
  BoundPlan& b = bound_plan(plan);
  check_single(b);
  check_state(b);
  const TensorView shard = shard_arg.view();
  take_shard(b, 0, shard);
  TensorArg out(new_out(b, 0, shard));
  launch(b);
  stack[0] = out.release();
}

// peer_call_new.list(Tensor[] shards, Tensor plan) -> Tensor[]
void peer_call_new_list(StableIValue* stack, uint64_t, uint64_t) {
  const TensorListArg shards(stack[0]);
  const TensorArg plan(stack[1]);
  BoundPlan& b = bound_plan(plan);
  check_state(b);
  const PeerCall& c = b.plan.call;
  SHARDSUM_CHECK(shards.size() == c.num_sources, "the plan has other rows");
  for (int i = 0; i < c.num_sources; ++i) take_shard(b, i, shards[i]);
  TensorListResult outs(c.num_outputs);
  for (int q = 0; q < c.num_outputs; ++q) outs.append(new_out(b, q, shards[0]));
  launch(b);
  stack[0] = outs.release();
}

// ---- any rows -----------------------------------------------------------------------------------------------------
void set_device_lengths(PeerCall& c, const TensorView& view) {
  const int32_t code = view.dtype_code();
  c.index64 = code == aoti_torch_dtype_int64();
  SHARDSUM_CHECK(c.index64 || code == aoti_torch_dtype_int32(), "lengths are neither int32 nor int64");
  SHARDSUM_CHECK(view.is_contiguous() && view.width(0) == c.num_sources, "one length a shard");
  SHARDSUM_CHECK(view.device_type() == aoti_torch_device_type_cuda(), "lengths are not on the device");
  c.device_lengths = view.data();
}

// Sums that go on: the accumulators of all outputs, one behind the other.
void set_accumulators(PeerCall& c, const TensorView& accumulators, int64_t carried) {
  int64_t positions = 0;
  for (int q = 0; q < c.num_outputs; ++q) positions += int64_t{c.outputs[q].end} - c.outputs[q].begin;
  const bool floats = c.in_dtype == DType::kFloat16 || c.in_dtype == DType::kBFloat16 || c.in_dtype == DType::kFloat32;
  SHARDSUM_CHECK(accumulators.is_contiguous() && bytes_from(accumulators, 0) == positions * c.width * (floats ? 4 : 8),
                 "accumulators do not fit the plan");
  SHARDSUM_CHECK(accumulators.device_type() == aoti_torch_device_type_cuda(), "accumulators are not on the device");
  SHARDSUM_CHECK(!c.move && !c.push && !c.two_shot && c.device_lengths == nullptr && carried >= 0,
                 "such a plan does not go on from accumulators");
  // Without outputs there are none, and this process's blocks only give its rows.
  c.accumulators = positions * c.width > 0 ? accumulators.data() : nullptr, c.carried = static_cast<int32_t>(carried);
}

// peer_run(Tensor(a!)[] outs, Tensor[] shards, int[] bounds, Tensor? lengths, int number, Tensor plan,
//          Tensor? accumulators, int carried, Tensor(c!)[] headers)
// bounds: start and length of each shard; ignored where lengths is given, with which all rows start at 0.
void peer_run(StableIValue* stack, uint64_t, uint64_t) {
  TensorListArg outs(stack[0]), shards(stack[1]), headers(stack[8]);
  IntListArg bounds(stack[2]);
  std::optional<TensorArg> lengths, accumulators;
  if (const auto handle = take_optional(stack[3])) lengths.emplace(*handle);
  if (const auto handle = take_optional(stack[6])) accumulators.emplace(*handle);
  const TensorArg tensor(stack[5]);
  Plan plan = read_whole_plan(tensor.view());
  PeerCall& c = plan.call;
  c.number = static_cast<uint32_t>(torch::stable::detail::to<int64_t>(stack[4]));
  SHARDSUM_CHECK(shards.size() == c.num_sources && outs.size() == c.num_outputs, "the plan has other rows");
  if (lengths) set_device_lengths(c, lengths->view());
  SHARDSUM_CHECK(c.device_lengths || bounds.size() == 2 * c.num_sources, "start and length of each shard");
  for (int i = 0; i < c.num_sources; ++i) {
    const bool on_device = c.device_lengths != nullptr;
    set_source(c, i, shards[i], on_device ? 0 : bounds[2 * i], on_device ? 0 : bounds[2 * i + 1]);
  }
  for (int q = 0; q < c.num_outputs; ++q) set_output(c, q, outs[q]);
  if (accumulators) set_accumulators(c, accumulators->view(), torch::stable::detail::to<int64_t>(stack[7]));
  SHARDSUM_CHECK(headers.size() <= kPeerHeaders, "too many headers");
  for (int i = 0; i < headers.size(); ++i) {
    const TensorView header = headers[i];
    SHARDSUM_CHECK(header.device_type() == aoti_torch_device_type_cuda() && header.is_contiguous() &&
                       bytes_from(header, 0) == 2 * int64_t{sizeof(int64_t)},
                   "a header is two int64 on the device");
    c.headers[i] = static_cast<int64_t*>(header.mutable_data());
  }
  check_alive(c);
  bool launched = false;
  enqueue(plan, shards[0].device_index(), launched);
  static_cast<int64_t*>(tensor.view().mutable_data())[1] = 1;
}

}  // namespace
}  // namespace shardsum

STABLE_TORCH_LIBRARY_IMPL(shardsum, CPU, m) {
  m.impl("peer_bind", &shardsum::peer_bind);
  m.impl("peer_call", &shardsum::peer_call);
  m.impl("peer_call_new", &shardsum::peer_call_new);
  m.impl("peer_call_new.list", &shardsum::peer_call_new_list);
}

#ifdef SHARDSUM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(shardsum, CUDA, m) {
  if (aoti_torch_get_current_cuda_stream == nullptr) return;
  m.impl("peer_bind", &shardsum::peer_bind);
  m.impl("peer_call", &shardsum::peer_call);
  m.impl("peer_call_new", &shardsum::peer_call_new);
  m.impl("peer_call_new.list", &shardsum::peer_call_new_list);
  m.impl("peer_run", &shardsum::peer_run);
}
#endif

// Constants that Python has, too, by name; -1 for an unknown name. For tests.
extern "C" __attribute__((visibility("default"), used)) int64_t shardsum_peer_constant(const char* name) {
  using namespace shardsum;
  const std::pair<const char*, int64_t> constants[] = {
      {"plan_version", kPlanVersion},        {"max_ranks", kPeerMaxRanks},
      {"max_hosted", kPeerMaxHosted},        {"max_row_dims", kMaxRowDims},
      {"state_failed", kStateFailed},        {"state_number", kStateNumber},
      {"float16", int64_t(DType::kFloat16)}, {"bfloat16", int64_t(DType::kBFloat16)},
      {"float32", int64_t(DType::kFloat32)}, {"float64", int64_t(DType::kFloat64)},
      {"uint8", int64_t(DType::kUInt8)},     {"int8", int64_t(DType::kInt8)},
      {"int16", int64_t(DType::kInt16)},     {"int32", int64_t(DType::kInt32)},
      {"int64", int64_t(DType::kInt64)},     {"bool", int64_t(DType::kBool)},
  };
  for (const auto& [known, value] : constants)
    if (std::strcmp(known, name) == 0) return value;
  return -1;
}
