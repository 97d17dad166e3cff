// What the operators of sums share: from tensors to the arguments of a kernel, and the devices that run one.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <array>

#include "boxed.h"
#include "headers.h"
#include "row_table.h"

// Weak: libtorch_cuda has it, a CPU-only torch does not. Null means there is no CUDA to launch on.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace shardsum {

// PyTorch's code of every DType, in its order.
inline const std::array<int32_t, 10>& dtype_codes() {
  static const std::array<int32_t, 10> codes{
      aoti_torch_dtype_float16(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float32(), aoti_torch_dtype_float64(),
      aoti_torch_dtype_uint8(),   aoti_torch_dtype_int8(),     aoti_torch_dtype_int16(),   aoti_torch_dtype_int32(),
      aoti_torch_dtype_int64(),   aoti_torch_dtype_bool()};
  return codes;
}

// `dtype`: a DType that was read from a plan.
inline int32_t dtype_code(int64_t dtype) {
  SHARDSUM_CHECK(dtype >= 0 && dtype < int64_t(dtype_codes().size()), "not a dtype: ", dtype);
  return dtype_codes()[dtype];
}

inline DType dtype_of(const TensorView& tensor) {
  const int32_t code = tensor.dtype_code();
  const auto& codes = dtype_codes();
  const auto found = std::find(codes.begin(), codes.end(), code);
  SHARDSUM_CHECK(found != codes.end(), "dtype code ", code, " has no native kernel");
  return static_cast<DType>(found - codes.begin());
}

// The table of shardsum/core/numerics.py.
inline bool can_return(DType in, DType out) {
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

inline bool is_floating(DType dtype) { return dtype <= DType::kFloat64; }

// Of a sum, where nobody asks for another.
inline int32_t sum_dtype_code(const TensorView& x) {
  return is_floating(dtype_of(x)) ? x.dtype_code() : aoti_torch_dtype_int64();
}

inline SumArgs describe(const TensorView& out, const TensorView& in, int64_t num_rows, const Finish& finish) {
  SumArgs args{dtype_of(in), dtype_of(out), num_rows};
  SHARDSUM_CHECK(can_return(args.in_dtype, args.out_dtype), "this pair of dtypes has no sum");
  SHARDSUM_CHECK(out.dim() >= 1 && out.is_contiguous(), "out is not contiguous");
  args.size = out.size(0);
  args.width = out.width();
  args.out = out.mutable_data();
  args.finish = finish;
  return args;
}

inline Finish take_mean_and_scale(const StableIValue* stack) {
  Finish finish;
  finish.mean = torch::stable::detail::to<bool>(stack[0]);
  if (const auto scale = torch::stable::detail::to<std::optional<double>>(stack[1])) {
    finish.has_scale = true;
    finish.scale = *scale;
  }
  return finish;
}

// `length` positions at `data`, the first at position `start`, clipped to [0, size).
inline Row clip(const void* data, int64_t start, int64_t length, const SumArgs& args) {
  const int64_t begin = start > 0 ? start : 0;
  const int64_t end = start < 0 || length < args.size - start ? start + length : args.size;
  if (begin >= args.size || end <= begin) return {nullptr, 0, 0};
  const int64_t skipped = (begin - start) * args.width * element_size(args.in_dtype);
  const int64_t stop = end < args.size ? end : args.size;
  return {static_cast<const char*>(data) + skipped, begin * args.width, stop * args.width};
}

inline void check_padded(const TensorView& x, const SumArgs& args) {
  SHARDSUM_CHECK(x.dim() >= 2 && x.width(2) == args.width, "x and out differ in their trailing shape");
  SHARDSUM_CHECK(x.is_contiguous_from(1), "x[r] is not contiguous");
}

// A new contiguous tensor of the shape sizes[0..dim) on the device of x.
inline StableIValue empty_on(const TensorView& x, const int64_t* sizes, int64_t dim, int32_t dtype_code) {
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

inline StableIValue contiguous_copy(const TensorView& x) {
  TensorArg copy(empty_on(x, x.sizes(), x.dim(), x.dtype_code()));
  check(aoti_torch_copy_(copy.handle(), x.handle(), 0), "copy");
  return copy.release();
}

struct Cpu {
  static bool owns(const TensorView& tensor) { return tensor.device_type() == aoti_torch_device_type_cpu(); }
  explicit Cpu(const TensorView&) {}
  void sum_rows(const SumArgs& args, const Row* rows) { sum_rows_cpu(args, rows); }
  void sum_masked(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask) {
    sum_masked_cpu(args, data, row_stride, mask);
  }
  void spread(const SpreadArgs& args, const SpreadRow* rows) { spread_cpu(args, rows); }
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
  void spread(const SpreadArgs& args, const SpreadRow* rows) { launched(spread_cuda(args, rows, stream_)); }
  void check_headers(const HeaderCheck& check) { launched(check_headers_cuda(check, stream_)); }

 private:
  static void launched(int error) { SHARDSUM_CHECK(error == 0, "CUDA error ", error, " at a launch"); }

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

}  // namespace shardsum
