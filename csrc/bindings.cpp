// The operators of shardsum/kernels.py for CPU and CUDA tensors: arguments in, one row table out to a kernel.
//
// Python has checked shapes, dtypes and devices and raised its own errors; the checks here only keep a wrong call
// from reading foreign memory. Except sum_checked and sum_checked_new, which check everything: an error there sends
// Python to its own checks. PyTorch's stable ABI alone is used, so one library serves torch 2.11 and later.
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>
#include <utility>

#include "boxed.h"
#include "row_table.h"

// Weak: libtorch_cuda has it, a CPU-only torch does not. Null means there is no CUDA to launch on.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace shardsum {
namespace {

DType dtype_of(const TensorView& tensor) {
  static const std::array<std::pair<int32_t, DType>, 10> codes{{
      {aoti_torch_dtype_float32(), DType::kFloat32},
      {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
      {aoti_torch_dtype_float16(), DType::kFloat16},
      {aoti_torch_dtype_float64(), DType::kFloat64},
      {aoti_torch_dtype_int64(), DType::kInt64},
      {aoti_torch_dtype_int32(), DType::kInt32},
      {aoti_torch_dtype_int16(), DType::kInt16},
      {aoti_torch_dtype_int8(), DType::kInt8},
      {aoti_torch_dtype_uint8(), DType::kUInt8},
      {aoti_torch_dtype_bool(), DType::kBool},
  }};
  const int32_t code = tensor.dtype_code();
  for (const auto& [known, dtype] : codes) {
    if (known == code) return dtype;
  }
  STD_TORCH_CHECK(false, "shardsum: dtype code ", code, " has no native kernel");
}

// The table of shardsum/numerics.py.
bool can_return(DType in, DType out) {
  switch (in) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
      return out == DType::kFloat16 || out == DType::kBFloat16 || out == DType::kFloat32;
    case DType::kFloat64:
      return out == DType::kFloat64 || out == DType::kFloat32;
    default:
      return out == DType::kInt64;
  }
}

bool is_floating(DType dtype) { return dtype <= DType::kFloat64; }

// Of a sum, where nobody asks for another.
int32_t sum_dtype_code(const TensorView& x) {
  return is_floating(dtype_of(x)) ? x.dtype_code() : aoti_torch_dtype_int64();
}

SumArgs describe(const TensorView& out, const TensorView& in, int64_t num_rows, const Finish& finish) {
  SumArgs args{dtype_of(in), dtype_of(out), num_rows};
  STD_TORCH_CHECK(can_return(args.in_dtype, args.out_dtype), "shardsum: this pair of dtypes has no sum");
  STD_TORCH_CHECK(out.dim() >= 1 && out.is_contiguous(), "shardsum: out is not contiguous");
  args.size = out.size(0);
  args.width = out.width();
  args.out = out.mutable_data();
  args.finish = finish;
  return args;
}

// mean, scale: of every operator.
Finish take_mean_scale(const StableIValue* stack) {
  Finish finish;
  finish.mean = torch::stable::detail::to<bool>(stack[0]);
  if (const auto scale = torch::stable::detail::to<std::optional<double>>(stack[1])) {
    finish.has_scale = true;
    finish.scale = *scale;
  }
  return finish;
}

// The last three arguments of most operators: mean, scale, accumulate.
Finish take_finish(const StableIValue* stack) {
  Finish finish = take_mean_scale(stack);
  finish.accumulate = torch::stable::detail::to<bool>(stack[2]);
  return finish;
}

// `length` positions at `data`, the first at position `start`, clipped to [0, size).
Row clip(const void* data, int64_t start, int64_t length, const SumArgs& args) {
  const int64_t begin = start > 0 ? start : 0;
  const int64_t end = start < 0 || length < args.size - start ? start + length : args.size;
  if (begin >= args.size || end <= begin) return {nullptr, 0, 0};
  const int64_t skipped = (begin - start) * args.width * element_size(args.in_dtype);
  const int64_t stop = end < args.size ? end : args.size;
  return {static_cast<const char*>(data) + skipped, begin * args.width, stop * args.width};
}

void check_padded(const TensorView& x, const SumArgs& args) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.width(2) == args.width, "shardsum: x and out differ in their trailing shape");
  STD_TORCH_CHECK(x.is_contiguous_from(1), "shardsum: x[r] is not contiguous");
}

// A new contiguous tensor of the shape sizes[0..dim) on the device of x.
StableIValue empty_on(const TensorView& x, const int64_t* sizes, int64_t dim, int32_t dtype_code) {
  Table<int64_t, 16> strides(dim);
  int64_t stride = 1;
  for (int64_t d = dim - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  AtenTensorHandle handle = nullptr;
  check(aoti_torch_empty_strided(dim, sizes, strides.data(), dtype_code, x.device_type(), x.device_index(), &handle),
        "empty");
  return torch::stable::detail::from(handle);
}

struct Cpu {
  static bool owns(const TensorView& tensor) { return tensor.device_type() == aoti_torch_device_type_cpu(); }
  explicit Cpu(const TensorView&) {}
  void sum_rows(const SumArgs& args, const Row* rows) { sum_rows_cpu(args, rows); }
  void sum_masked(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask) {
    sum_masked_cpu(args, data, row_stride, mask);
  }
};

#ifdef SHARDSUM_WITH_CUDA
// The current stream of the tensors' device, made current for the scope where it is not already.
class Cuda {
 public:
  static bool owns(const TensorView& tensor) { return tensor.device_type() == aoti_torch_device_type_cuda(); }
  explicit Cuda(const TensorView& out) : device_(out.device_index()) {
    int current = -1;
    launched(current_cuda_device(&current));  // torch's own answer takes three times as long
    if (current != device_) guard_.emplace(device_);
    check(aoti_torch_get_current_cuda_stream(device_, &stream_), "current CUDA stream");
  }
  void sum_rows(const SumArgs& args, const Row* rows) { launched(sum_rows_cuda(args, rows, workspace(args), stream_)); }
  void sum_device_rows(const SumArgs& args, const DeviceRows& rows) {
    launched(sum_device_rows_cuda(args, rows, workspace(args), stream_));
  }
  void sum_masked(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask) {
    launched(sum_masked_cuda(args, data, row_stride, mask, workspace(args), stream_));
  }

 private:
  static void launched(int error) { STD_TORCH_CHECK(error == 0, "shardsum: CUDA error ", error, " at a launch"); }

  // From the caching allocator on the current stream: freed at the end of the scope, reused in stream order.
  void* workspace(const SumArgs& args) {
    const int64_t bytes = workspace_bytes(args);
    if (bytes == 0) return nullptr;
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    check(aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), aoti_torch_device_type_cuda(), device_,
                                   &handle),
          "workspace");
    workspace_.emplace(torch::stable::detail::from(handle));
    return workspace_->view().mutable_data();
  }

  int32_t device_;
  void* stream_ = nullptr;
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  std::optional<TensorArg> workspace_;
};
#endif

template <class Device>
void sum_rows(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]);
  TensorListArg rows(stack[1]);
  IntListArg starts(stack[2]);
  const Finish finish = take_finish(stack + 3);

  const TensorView out = out_arg.view();
  STD_TORCH_CHECK(rows.size() > 0 && starts.size() == rows.size(), "shardsum: rows and starts differ in number");
  const SumArgs args = describe(out, rows[0], rows.size(), finish);
  const int32_t dtype = rows[0].dtype_code();
  Table<Row> table(rows.size());
  for (int64_t r = 0; r < rows.size(); ++r) {
    const TensorView row = rows[r];
    STD_TORCH_CHECK(row.dim() >= 1 && row.width() == args.width && row.dtype_code() == dtype && Device::owns(row),
                    "shardsum: row ", r, " differs from the others in trailing shape, dtype or device");
    STD_TORCH_CHECK(row.is_contiguous(), "shardsum: row ", r, " is not contiguous");
    table[r] = clip(row.data(), starts[r], row.size(0), args);
  }
  if (args.size * args.width > 0) Device(out).sum_rows(args, table.data());
}

// A length for each row of x; starts: null where every row starts at 0.
template <class Device>
void sum_padded_rows(const TensorView& out, const TensorView& x, const int64_t* starts, const int64_t* lengths,
                     const Finish& finish) {
  const SumArgs args = describe(out, x, x.size(0), finish);
  check_padded(x, args);
  STD_TORCH_CHECK(Device::owns(x), "shardsum: x is on another device");
  const char* data = static_cast<const char*>(x.data());
  const int64_t row_bytes = x.stride(0) * element_size(args.in_dtype), capacity = x.size(1);
  Table<Row> table(args.num_rows);
  for (int64_t r = 0; r < args.num_rows; ++r) {
    STD_TORCH_CHECK(lengths[r] >= 0 && lengths[r] <= capacity, "shardsum: length ", lengths[r], " of row ", r);
    table[r] = clip(data + r * row_bytes, starts ? starts[r] : 0, lengths[r], args);
  }
  if (args.size * args.width > 0) Device(out).sum_rows(args, table.data());
}

template <class Device>
void sum_padded(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out(stack[0]), x_arg(stack[1]);
  const IntListArg starts(stack[2]), lengths(stack[3]);
  const Finish finish = take_finish(stack + 4);
  const TensorView x = x_arg.view();
  STD_TORCH_CHECK(x.dim() >= 2 && lengths.size() == x.size(0), "shardsum: x and lengths differ in rows");
  STD_TORCH_CHECK(starts.size() == 0 || starts.size() == lengths.size(), "shardsum: starts and lengths differ");
  sum_padded_rows<Device>(out.view(), x, starts.size() ? starts.data() : nullptr, lengths.data(), finish);
}

// What sum_padded trusts its caller with, where the result has x's positions and all rows start at 0.
template <class Device>
void check_sum(const TensorView& x, int64_t num_lengths, const Finish& finish) {
  STD_TORCH_CHECK(Device::owns(x) && x.dim() >= 2 && x.size(0) > 0, "shardsum: x is not (R, S_MAX, *F)");
  STD_TORCH_CHECK(x.size(0) == num_lengths, "shardsum: x and lengths differ in rows");
  STD_TORCH_CHECK(is_floating(dtype_of(x)) || !(finish.mean || finish.has_scale), "shardsum: no mean of integers");
}

template <class Device>
void check_out(const TensorView& out, const TensorView& x) {
  STD_TORCH_CHECK(Device::owns(out) && out.device_index() == x.device_index(), "shardsum: out is on another device");
  bool same = out.dim() == x.dim() - 1;
  for (int64_t d = 0; same && d < out.dim(); ++d) same = out.size(d) == x.size(d + 1);
  STD_TORCH_CHECK(same, "shardsum: out has another shape than the result");
  STD_TORCH_CHECK(!overlap(out, x), "shardsum: out shares memory with x");
}

// Owns a `Tensor` argument that holds lengths like an IntListArg.
class IntTensorArg {
 public:
  explicit IntTensorArg(StableIValue value) : tensor_(value), view_(tensor_.view()) {
    STD_TORCH_CHECK(Cpu::owns(view_) && view_.dtype_code() == aoti_torch_dtype_int64(),
                    "shardsum: no CPU int64 lengths");
    STD_TORCH_CHECK(view_.dim() == 1 && view_.is_contiguous(), "shardsum: lengths are not in a row");
  }
  int64_t size() const { return view_.size(0); }
  const int64_t* data() const { return static_cast<const int64_t*>(view_.data()); }

 private:
  TensorArg tensor_;
  TensorView view_;
};

// sum_checked(Tensor(a!) out, Tensor x, Tensor lengths) -> (), and with (..., bool mean, float? scale)
template <class Device, bool kPlain>
void sum_checked(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), x_arg(stack[1]);
  const IntTensorArg lengths(stack[2]);
  const Finish finish = kPlain ? Finish{} : take_mean_scale(stack + 3);
  const TensorView out = out_arg.view(), x = x_arg.view();
  check_sum<Device>(x, lengths.size(), finish);
  check_out<Device>(out, x);
  sum_padded_rows<Device>(out, x, nullptr, lengths.data(), finish);
}

// sum_checked_new(Tensor x, Tensor lengths) -> Tensor, and with (..., bool mean, float? scale)
template <class Device, bool kPlain>
void sum_checked_new(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg x_arg(stack[0]);
  const IntTensorArg lengths(stack[1]);
  const Finish finish = kPlain ? Finish{} : take_mean_scale(stack + 2);
  const TensorView x = x_arg.view();
  check_sum<Device>(x, lengths.size(), finish);
  TensorArg out(empty_on(x, x.sizes() + 1, x.dim() - 1, sum_dtype_code(x)));
  sum_padded_rows<Device>(out.view(), x, nullptr, lengths.data(), finish);
  stack[0] = out.release();
}

// Fills the table with the shards of a list, all of which start at 0; returns the longest one's length.
template <class Device>
int64_t list_shards(TensorListArg& shards, const Finish& finish, Table<Row>& table) {
  STD_TORCH_CHECK(shards.size() > 0, "shardsum: no shards");
  const TensorView first = shards[0];
  STD_TORCH_CHECK(is_floating(dtype_of(first)) || !(finish.mean || finish.has_scale), "shardsum: no mean of integers");
  const int64_t width = first.width();
  int64_t longest = 0;
  for (int64_t r = 0; r < shards.size(); ++r) {
    const TensorView shard = shards[r];
    bool same = shard.dim() >= 1 && shard.dim() == first.dim() && shard.dtype_code() == first.dtype_code() &&
                Device::owns(shard) && shard.device_index() == first.device_index();
    for (int64_t d = 1; same && d < shard.dim(); ++d) same = shard.size(d) == first.size(d);
    STD_TORCH_CHECK(same, "shardsum: shard ", r, " differs from the first in trailing shape, dtype or device");
    STD_TORCH_CHECK(shard.is_contiguous(), "shardsum: shard ", r, " is not contiguous");
    const int64_t length = shard.size(0);
    longest = std::max(longest, length);
    table[r] = length > 0 ? Row{shard.data(), 0, length * width} : Row{nullptr, 0, 0};
  }
  return longest;
}

void check_apart(const SumArgs& args, const Row* rows) {
  const auto out = reinterpret_cast<uintptr_t>(args.out);
  const uintptr_t out_end = out + args.size * args.width * element_size(args.out_dtype);
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const auto row = reinterpret_cast<uintptr_t>(rows[r].data);
    const uintptr_t row_end = row + rows[r].end * element_size(args.in_dtype);
    STD_TORCH_CHECK(row == row_end || out == out_end || row >= out_end || out >= row_end,
                    "shardsum: out shares memory with shard ", r);
  }
}

// sum_checked.list(Tensor(a!) out, Tensor[] shards, int size, bool mean, float? scale); size -1: the longest shard's
template <class Device>
void sum_checked_list(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]);
  TensorListArg shards(stack[1]);
  const auto size = torch::stable::detail::to<int64_t>(stack[2]);
  const Finish finish = take_mean_scale(stack + 3);
  const TensorView out = out_arg.view();
  Table<Row> rows(shards.size());
  const int64_t longest = list_shards<Device>(shards, finish, rows);
  const TensorView first = shards[0];
  STD_TORCH_CHECK(Device::owns(out) && out.device_index() == first.device_index(),
                  "shardsum: out is on another device");
  const SumArgs args = describe(out, first, shards.size(), finish);
  bool same = out.dim() == first.dim() && args.size == (size < 0 ? longest : size) && args.size >= longest;
  for (int64_t d = 1; same && d < out.dim(); ++d) same = out.size(d) == first.size(d);
  STD_TORCH_CHECK(same, "shardsum: out has another shape than the result");
  check_apart(args, rows.data());
  if (args.size * args.width > 0) Device(out).sum_rows(args, rows.data());
}

// sum_checked_new.list(Tensor[] shards, bool mean, float? scale) -> Tensor
template <class Device>
void sum_checked_new_list(StableIValue* stack, uint64_t, uint64_t) {
  TensorListArg shards(stack[0]);
  const Finish finish = take_mean_scale(stack + 1);
  Table<Row> rows(shards.size());
  const int64_t longest = list_shards<Device>(shards, finish, rows);
  const TensorView first = shards[0];
  Table<int64_t, 16> sizes(first.dim());
  std::copy(first.sizes(), first.sizes() + first.dim(), sizes.data());
  sizes[0] = longest;
  TensorArg out(empty_on(first, sizes.data(), first.dim(), sum_dtype_code(first)));
  const SumArgs args = describe(out.view(), first, shards.size(), finish);
  if (args.size * args.width > 0) Device(out.view()).sum_rows(args, rows.data());
  stack[0] = out.release();
}

struct DevicePaddedArgs {
  SumArgs args;
  DeviceRows rows;
};

DevicePaddedArgs describe_device_rows(const TensorView& out, const TensorView& x, const TensorView& lengths,
                                      const std::optional<TensorArg>& starts, const Finish& finish) {
  DevicePaddedArgs d{describe(out, x, x.size(0), finish), {}};
  check_padded(x, d.args);
  const int32_t code = lengths.dtype_code();
  STD_TORCH_CHECK(code == aoti_torch_dtype_int64() || code == aoti_torch_dtype_int32(),
                  "shardsum: lengths are neither int32 nor int64");
  STD_TORCH_CHECK(lengths.dim() == 1 && lengths.size(0) == x.size(0) && lengths.is_contiguous(),
                  "shardsum: lengths are not one contiguous value a row");
  d.rows = {x.data(), x.stride(0), x.size(1), lengths.data(), nullptr, code == aoti_torch_dtype_int64()};
  if (starts) {
    const TensorView s = starts->view();
    STD_TORCH_CHECK(s.dtype_code() == code && s.dim() == 1 && s.size(0) == x.size(0) && s.is_contiguous(),
                    "shardsum: starts differ from lengths in dtype, shape or layout");
    d.rows.starts = s.data();
  }
  return d;
}

int64_t value_at(const void* values, bool index64, int64_t r) {
  return index64 ? static_cast<const int64_t*>(values)[r] : static_cast<const int32_t*>(values)[r];
}

// On the CPU "device-resident" bounds are simply read.
void sum_device_rows(Cpu device, const DevicePaddedArgs& d) {
  const DeviceRows& rows = d.rows;
  const int64_t row_bytes = rows.row_stride * element_size(d.args.in_dtype);
  Table<Row> table(d.args.num_rows);
  for (int64_t r = 0; r < d.args.num_rows; ++r) {
    const int64_t start = rows.starts ? value_at(rows.starts, rows.index64, r) : 0;
    const int64_t length = value_at(rows.lengths, rows.index64, r);
    table[r] = clip(static_cast<const char*>(rows.data) + r * row_bytes, start > 0 ? start : 0,
                    length > rows.capacity ? rows.capacity : length, d.args);
  }
  device.sum_rows(d.args, table.data());
}

#ifdef SHARDSUM_WITH_CUDA
void sum_device_rows(Cuda device, const DevicePaddedArgs& d) { device.sum_device_rows(d.args, d.rows); }
#endif

template <class Device>
void sum_padded_device(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), x_arg(stack[1]);
  std::optional<TensorArg> starts;
  if (const auto handle = take_optional(stack[2])) starts.emplace(*handle);
  const TensorArg lengths_arg(stack[3]);
  const Finish finish = take_finish(stack + 4);

  const TensorView out = out_arg.view(), lengths = lengths_arg.view();
  const DevicePaddedArgs d = describe_device_rows(out, x_arg.view(), lengths, starts, finish);
  STD_TORCH_CHECK(Device::owns(out) && Device::owns(x_arg.view()) && Device::owns(lengths) &&
                      (!starts || Device::owns(starts->view())),
                  "shardsum: out, x, starts and lengths are on different devices");
  if (d.args.size * d.args.width > 0) sum_device_rows(Device(out), d);
}

template <class Device>
void sum_masked(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]), x_arg(stack[1]), mask_arg(stack[2]);
  const Finish finish = take_finish(stack + 3);

  const TensorView out = out_arg.view(), x = x_arg.view(), mask = mask_arg.view();
  const SumArgs args = describe(out, x, x.size(0), finish);
  check_padded(x, args);
  const bool bits = mask.dtype_code() == aoti_torch_dtype_int32();
  STD_TORCH_CHECK(bits || mask.dtype_code() == aoti_torch_dtype_bool(), "shardsum: mask is neither bool nor int32");
  STD_TORCH_CHECK(Device::owns(out) && Device::owns(x) && Device::owns(mask), "shardsum: x or mask on another device");
  STD_TORCH_CHECK(mask.dim() == 2 && mask.size(0) == x.size(0) && x.size(1) == args.size &&
                      mask.size(1) == (bits ? (args.size + 31) / 32 : args.size) && mask.is_contiguous_from(1),
                  "shardsum: mask does not fit x");
  if (args.size * args.width == 0) return;
  Device(out).sum_masked(args, x.data(), x.stride(0), Mask{mask.data(), mask.stride(0), bits});
}

template <class Device>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("sum_rows", &sum_rows<Device>);
  m.impl("sum_padded", &sum_padded<Device>);
  m.impl("sum_padded_device", &sum_padded_device<Device>);
  m.impl("sum_masked", &sum_masked<Device>);
  m.impl("sum_checked", &sum_checked<Device, true>);
  m.impl("sum_checked.finish", &sum_checked<Device, false>);
  m.impl("sum_checked.list", &sum_checked_list<Device>);
  m.impl("sum_checked_new", &sum_checked_new<Device, true>);
  m.impl("sum_checked_new.finish", &sum_checked_new<Device, false>);
  m.impl("sum_checked_new.list", &sum_checked_new_list<Device>);
}

}  // namespace
}  // namespace shardsum

STABLE_TORCH_LIBRARY_IMPL(shardsum, CPU, m) { shardsum::register_operators<shardsum::Cpu>(m); }

#ifdef SHARDSUM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(shardsum, CUDA, m) {
  // Left out where nothing could be launched: the operators then run in plain torch.
  if (aoti_torch_get_current_cuda_stream) shardsum::register_operators<shardsum::Cuda>(m);
}
#endif

#define SHARDSUM_EXPORT extern "C" __attribute__((visibility("default"), used))

// Read from the file by shardsum/native.py: which sources, built for which architectures.
SHARDSUM_EXPORT const char shardsum_build[] = "shardsum-build:" SHARDSUM_BUILD ";";

SHARDSUM_EXPORT int shardsum_has_cuda() {
#ifdef SHARDSUM_WITH_CUDA
  return aoti_torch_get_current_cuda_stream != nullptr;
#else
  return 0;
#endif
}
