// The adjoint of a sum of rows: copies, and zeros around them, in units of up to 16 bytes.
#include <algorithm>

#include "launch.h"

namespace shardsum {
namespace {

constexpr int kSpreadThreads = 256, kSpreadItems = 4, kSpreadRows = 64;

struct SpreadParams {
  const void* in;
  void* out;
  int64_t row_units;
  int num_rows;
  SpreadRow rows[kSpreadRows];  // in units
};

// The blocks of all rows at one place follow each other, so that what they copy is read from memory once.
template <typename Unit>
__global__ void __launch_bounds__(kSpreadThreads) spread_kernel(const __grid_constant__ SpreadParams p) {
  const int r = blockIdx.x % p.num_rows;
  const int64_t first = int64_t(blockIdx.x / p.num_rows) * (kSpreadThreads * kSpreadItems) + threadIdx.x;
  const SpreadRow row = p.rows[r];
  const Unit* in = static_cast<const Unit*>(p.in) + (row.source - row.begin);
  Unit* out = static_cast<Unit*>(p.out) + r * p.row_units;
  Unit values[kSpreadItems];
#pragma unroll
  for (int k = 0; k < kSpreadItems; ++k) {
    const int64_t i = first + k * kSpreadThreads;
    values[k] = row.begin <= i && i < row.end ? in[i] : Unit{};
  }
#pragma unroll
  for (int k = 0; k < kSpreadItems; ++k) {
    const int64_t i = first + k * kSpreadThreads;
    if (i < p.row_units) out[i] = values[k];
  }
}

template <typename Unit>
int spread_units(const SpreadArgs& a, const SpreadRow* rows, cudaStream_t stream) {
  constexpr int64_t kUnit = sizeof(Unit), kPerBlock = kSpreadThreads * kSpreadItems;
  SpreadParams p;
  p.in = a.in;
  p.row_units = a.row_bytes / kUnit;
  for (int64_t first = 0; first < a.num_rows; first += kSpreadRows) {
    p.num_rows = int(std::min<int64_t>(a.num_rows - first, kSpreadRows));
    p.out = static_cast<char*>(a.out) + first * a.row_bytes;
    for (int r = 0; r < p.num_rows; ++r) {
      const SpreadRow& row = rows[first + r];
      p.rows[r] = {row.source / kUnit, row.begin / kUnit, row.end / kUnit};
    }
    const int64_t blocks = (p.row_units + kPerBlock - 1) / kPerBlock * p.num_rows;
    if (const int error = launch(spread_kernel<Unit>, blocks, kSpreadThreads, stream, p)) return error;
  }
  return 0;
}

}  // namespace

int spread_cuda(const SpreadArgs& a, const SpreadRow* rows, void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  if (a.num_rows * a.row_bytes == 0) return 0;
  const auto fits = [&](int64_t bytes) {
    return is_multiple(a.in, bytes) && is_multiple(a.out, bytes) && a.position_bytes % bytes == 0;
  };
  if (fits(16)) return spread_units<uint4>(a, rows, stream);
  if (fits(8)) return spread_units<uint2>(a, rows, stream);
  if (fits(4)) return spread_units<uint32_t>(a, rows, stream);
  if (fits(2)) return spread_units<uint16_t>(a, rows, stream);
  return spread_units<uint8_t>(a, rows, stream);
}

}  // namespace shardsum
