// The operators of shardsum/local/kernels.py for CPU and CUDA tensors: arguments in, one row table out to a kernel.
//
// Python has checked shapes, dtypes and devices and raised its own errors; the checks here only keep a wrong call
// from reading foreign memory. PyTorch's stable ABI is all that is used, so one library serves torch 2.11 and later.
#include "plan.h"

namespace shardsum {
namespace {

// The accumulators at which sums into args.out start.
template <class Device>
const void* carry_of(const TensorView& carry, const SumArgs& args) {
  const DType accumulator = !is_floating(args.in_dtype)        ? DType::kInt64
                            : args.in_dtype == DType::kFloat64 ? DType::kFloat64
                                                               : DType::kFloat32;
  SHARDSUM_CHECK(dtype_of(carry) == accumulator && Device::owns(carry), "carry is not of accumulators");
  SHARDSUM_CHECK(carry.is_contiguous() && carry.width(0) == args.size * args.width, "carry does not fit out");
  return carry.data();
}

// sum_rows(Tensor(a!) out, Tensor? carry, Tensor[] rows, int[] starts, int carried, bool mean, float? scale)
template <class Device>
void sum_rows(StableIValue* stack, uint64_t, uint64_t) {
  const TensorArg out_arg(stack[0]);
  std::optional<TensorArg> carry;
  if (const auto handle = take_optional(stack[1])) carry.emplace(*handle);
  TensorListArg rows(stack[2]);
  const IntListArg starts(stack[3]);
  const int64_t carried = torch::stable::detail::to<int64_t>(stack[4]);
  Finish finish = take_mean_and_scale(stack + 5);
  SHARDSUM_CHECK(carried >= 0 && carried <= INT32_MAX, carried, " carried contributions");
  finish.carried = static_cast<int32_t>(carried);

  const TensorView out = out_arg.view();
  SHARDSUM_CHECK(rows.size() > 0 && starts.size() == rows.size(), "rows and starts differ in number");
  SumArgs args = describe(out, rows[0], rows.size(), finish);
  if (carry) args.carry = carry_of<Device>(carry->view(), args);
  const int32_t dtype = rows[0].dtype_code();
  Table<Row> table(rows.size());
  for (int64_t r = 0; r < rows.size(); ++r) {
    const TensorView row = rows[r];
    SHARDSUM_CHECK(row.dim() >= 1 && row.width() == args.width && row.dtype_code() == dtype && Device::owns(row),
                   "row ", r, " differs from the others in trailing shape, dtype or device");
    SHARDSUM_CHECK(row.is_contiguous(), "row ", r, " is not contiguous");
    table[r] = clip(row.data(), starts[r], row.size(0), args);
  }
  if (args.size * args.width > 0) Device(out).sum_rows(args, table.data());
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
  SHARDSUM_CHECK(code == aoti_torch_dtype_int64() || code == aoti_torch_dtype_int32(),
                 "lengths are neither int32 nor int64");
  SHARDSUM_CHECK(lengths.dim() == 1 && lengths.size(0) == x.size(0) && lengths.is_contiguous(),
                 "lengths are not one contiguous value a row");
  d.rows = {x.data(), x.stride(0), x.size(1), lengths.data(), nullptr, code == aoti_torch_dtype_int64()};
  if (starts) {
    const TensorView s = starts->view();
    SHARDSUM_CHECK(s.dtype_code() == code && s.dim() == 1 && s.size(0) == x.size(0) && s.is_contiguous(),
                   "starts differ from lengths in dtype, shape or layout");
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
  const Finish finish = take_mean_and_scale(stack + 4);

  const TensorView out = out_arg.view(), lengths = lengths_arg.view();
  const DevicePaddedArgs d = describe_device_rows(out, x_arg.view(), lengths, starts, finish);
  SHARDSUM_CHECK(Device::owns(out) && Device::owns(x_arg.view()) && Device::owns(lengths) &&
                     (!starts || Device::owns(starts->view())),
                 "out, x, starts and lengths are on different devices");
  if (d.args.size * d.args.width > 0) sum_device_rows(Device(out), d);
}

#ifdef SHARDSUM_WITH_CUDA
int64_t* words_of(const TensorView& tensor, int64_t count, const char* name) {
  SHARDSUM_CHECK(tensor.dtype_code() == aoti_torch_dtype_int64() && tensor.is_contiguous() && tensor.width(0) == count,
                 name, " is not ", count, " words");
  return static_cast<int64_t*>(tensor.mutable_data());
}

// check_headers(Tensor(a!)[] outs, Tensor(b!) header, Tensor(c!) state, Tensor(d!) record, Tensor received,
// int[] offsets, int[] processes): shardsum/transports/headers.py
void check_headers(StableIValue* stack, uint64_t, uint64_t) {
  TensorListArg outs(stack[0]);
  const TensorArg header_arg(stack[1]), state_arg(stack[2]), record_arg(stack[3]), received_arg(stack[4]);
  const IntListArg offsets(stack[5]), processes(stack[6]);
  const TensorView header = header_arg.view(), state = state_arg.view(), received = received_arg.view();
  SHARDSUM_CHECK(Cuda::owns(header) && Cuda::owns(state) && Cuda::owns(received) && Cpu::owns(record_arg.view()),
                 "headers and state must be on the GPU, the record in pinned memory");
  SHARDSUM_CHECK(received.dtype_code() == aoti_torch_dtype_uint8() && received.is_contiguous() &&
                     offsets.size() == processes.size(),
                 "these are no received headers");
  for (int64_t i = 0; i < offsets.size(); ++i)
    SHARDSUM_CHECK(offsets[i] >= 0 && offsets[i] + kHeaderBytes <= received.width(0), "header ", i,
                   " lies beyond what was received");
  HeaderCheck check{words_of(header, 2, "header"), words_of(state, 2, "state"),
                    words_of(record_arg.view(), 4, "record"), static_cast<const uint8_t*>(received.data())};
  Cuda device(header);
  int64_t i = 0, o = 0;
  do {  // results go with the last headers, or after them: what the headers were stays in `header`
    check.num_headers = check.num_spoiled = 0;
    for (; i < offsets.size() && check.num_headers < kMaxHeaders; ++i, ++check.num_headers) {
      check.offsets[check.num_headers] = offsets[i];
      check.processes[check.num_headers] = static_cast<int32_t>(processes[i]);
    }
    for (; i == offsets.size() && o < outs.size() && check.num_spoiled < kMaxSpoiled; ++o, ++check.num_spoiled) {
      const TensorView out = outs[o];
      SHARDSUM_CHECK(Cuda::owns(out) && out.is_contiguous(), "out ", o, " is not contiguous on the GPU");
      check.spoiled[check.num_spoiled] = {static_cast<uint8_t*>(out.mutable_data()), out.spanned_bytes()};
    }
    device.check_headers(check);
  } while (i < offsets.size() || o < outs.size());
}
#endif

template <class Device>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("sum_rows", &sum_rows<Device>);
  m.impl("sum_padded_device", &sum_padded_device<Device>);
  m.impl("sum_plan", &sum_plan<Device, PaddedShards>);
  m.impl("sum_plan.list", &sum_plan<Device, ListedShards>);
  m.impl("sum_plan.masked", &sum_plan<Device, MaskedShards>);
  m.impl("sum_plan_new", &sum_plan_new<Device, PaddedShards>);
  m.impl("sum_plan_new.list", &sum_plan_new<Device, ListedShards>);
  m.impl("sum_plan_new.masked", &sum_plan_new<Device, MaskedShards>);
  m.impl("spread_plan", &spread_plan<Device>);
}

}  // namespace
}  // namespace shardsum

STABLE_TORCH_LIBRARY_IMPL(shardsum, CPU, m) { shardsum::register_operators<shardsum::Cpu>(m); }

#ifdef SHARDSUM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(shardsum, CUDA, m) {
  // Left out where nothing could be launched: the operators then run in plain torch.
  if (!aoti_torch_get_current_cuda_stream) return;
  shardsum::register_operators<shardsum::Cuda>(m);
  m.impl("check_headers", &shardsum::check_headers);
}
#endif

#define SHARDSUM_EXPORT extern "C" __attribute__((visibility("default"), used))

// Read from the file by shardsum/native/loader.py: which sources, built for which architectures.
SHARDSUM_EXPORT const char shardsum_build[] = "shardsum-build:" SHARDSUM_BUILD ";";

SHARDSUM_EXPORT int shardsum_has_cuda() {
#ifdef SHARDSUM_WITH_CUDA
  return aoti_torch_get_current_cuda_stream != nullptr;
#else
  return 0;
#endif
}
