// The one description of a sum that every kernel reads (host side; no torch, no CUDA headers).
//
// A sum is R rows over a flat output of `size * width` elements. Row r holds the elements
// [begin, end) of that range, contiguous in memory, `data` pointing at element `begin`:
//
//     out[i] = finish( +0.0 + sum over r = 0, 1, ..., R-1 with begin_r <= i < end_r of data_r[i - begin_r] )
//
// finish: divide by the number of contributing rows (mean; 0 where there is none), multiply by scale,
// then, with accumulate, add to the value already in out; all of it in the accumulator's type, each step
// rounded once, no contraction. Last, one rounding to the output's type. A kernel never learns where
// rows come from (shards in place, a gathered buffer, peer memory).
//
// A sum may be carried: it then starts at carry[i], the unrounded sum of rows that were added elsewhere, and not at
// +0.0. With an output in the accumulator's type and nothing to finish it is carried on.
#pragma once
#include <cstdint>

namespace shardsum {

enum class DType : int32_t {
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,  // accumulate in fp32, fp32, fp32, fp64
  kUInt8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,  // accumulate in int64 (wraps)
};

inline int64_t element_size(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
      break;
  }
  return 8;
}

// Of the accumulator.
inline int64_t accumulator_size(DType dtype) { return dtype <= DType::kFloat32 ? 4 : 8; }

struct Row {
  const void* data;  // address of element `begin`; any alignment that the dtype allows
  int64_t begin;     // flat elements
  int64_t end;       // begin <= end
};

struct Finish {
  bool mean = false;
  bool has_scale = false;
  double scale = 1.0;  // converted once to the accumulator's type
  bool accumulate = false;
  int32_t carried = 0;  // contributions to each carried accumulator, for the mean
};

// Rows whose bounds are only known on the device. Row r starts at `data + r * row_stride` (elements)
// and holds `capacity` positions of `width` elements. With b = min(max(starts[r], 0), size) and
// n = min(max(lengths[r], 0), capacity) it covers the positions [b, min(b + n, size)).
struct DeviceRows {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t capacity = 0;
  const void* lengths = nullptr;  // (num_rows,) int32 or int64, where the data is
  const void* starts = nullptr;   // the same type, or null: every row starts at 0
  bool index64 = true;            // lengths and starts are int64 (else int32)
};

// mask[r, p] says whether row r contributes at position p. Bytes: bool tensor (R, size), rows mask_stride
// bytes apart. Bits: bit (p & 31) of word[r * mask_stride + p / 32], uint32.
struct Mask {
  const void* data = nullptr;
  int64_t stride = 0;
  bool bits = false;
};

struct SumArgs {
  DType in_dtype;
  DType out_dtype;
  int64_t num_rows = 0;
  int64_t size = 0;     // positions of the output
  int64_t width = 1;    // elements per position
  void* out = nullptr;  // contiguous, size * width elements
  Finish finish;
  const void* carry = nullptr;  // size * width accumulators, none of them -0.0 (a sum from +0.0 never is); null: +0.0
};

// The adjoint of a sum is a copy: row r of the output, `row_bytes` long, gets the bytes at `in + source` at [begin,
// end) and zero bytes elsewhere.
struct SpreadRow {
  int64_t source;
  int64_t begin;
  int64_t end;  // begin <= end <= row_bytes
};
struct SpreadArgs {
  const void* in;
  void* out;
  int64_t row_bytes;
  int64_t num_rows;
  int64_t position_bytes;  // divides all of the above
};

// CPU: threads by the caller's parallel_for; see cpu/.
void sum_rows_cpu(const SumArgs& args, const Row* rows);
void sum_masked_cpu(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask);
void spread_cpu(const SpreadArgs& args, const SpreadRow* rows);

// The device that a launch from this library goes to now. Returns a cudaError_t as int.
int current_cuda_device(int* device);

// CUDA: on `stream` of the current device, no synchronisation, no allocation besides `workspace`
// (size * width accumulators; needed only where workspace_bytes() is not 0: R beyond one launch's table).
// Return a cudaError_t as int.
int64_t workspace_bytes(const SumArgs& args);
int sum_rows_cuda(const SumArgs& args, const Row* rows, void* workspace, void* stream);
int sum_device_rows_cuda(const SumArgs& args, const DeviceRows& rows, void* workspace, void* stream);
int sum_masked_cuda(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask, void* workspace,
                    void* stream);
int spread_cuda(const SpreadArgs& args, const SpreadRow* rows, void* stream);

}  // namespace shardsum
