// The ragged sum into a small output, where latency counts and not bytes: as few dependent steps as possible.
//
// Few rows, or up to kStridedRows of one padded tensor: one thread per vector (or element) holds all of them; bounds
// are plain kernel arguments. Many rows: a block takes 32 elements; its warps fetch the rows side by side into shared
// memory as accumulators, then one warp adds them in row order.
#pragma once
#include "sum_rows.cuh"

namespace shardsum {

constexpr int kFewRows = 8, kStridedFew = 16, kStridedRows = 64, kFewThreads = 128;
constexpr int kManyRows = 128, kManyThreads = 256;

// Rows anywhere, bounds in units; unused rows have length 0.
template <int ROWS>
struct ListedRows {
  static constexpr int kRows = ROWS;
  int begins[ROWS], lengths[ROWS];
  const char* origins[ROWS];

  __device__ bool covers(int r, unsigned unit) const { return unit - begins[r] < unsigned(lengths[r]); }
  __device__ const char* origin(int r) const { return origins[r]; }
};

// Rows that begin with the output and lie `stride` bytes apart: a table a quarter as long, which is what counts for
// many rows, since parameters come through the constant cache piece by piece.
template <int ROWS>
struct StridedRows {
  static constexpr int kRows = ROWS;
  const char* first;
  unsigned stride;
  int lengths[ROWS];

  __device__ bool covers(int r, unsigned unit) const { return unit < unsigned(lengths[r]); }
  __device__ const char* origin(int r) const { return first + uint64_t(stride) * r; }
};

template <typename Rows>
struct FewRowsParams {
  void* out;
  int num_units;
  Rows rows;
  Epilogue epilogue;
};

// kItems elements of a thread, a block's width apart.
template <typename T, bool kAligned, bool kPlain, int kItems, typename Rows>
__global__ void __launch_bounds__(kFewThreads, 1) sum_few_rows_kernel(const __grid_constant__ FewRowsParams<Rows> p) {
  static_assert(kItems == 1 || (kPlain && !kAligned));
  constexpr int V = kAligned ? kVec<T> : 1, ROWS = Rows::kRows;
  const unsigned unit = blockIdx.x * (kFewThreads * kItems) + threadIdx.x;
  if (unit >= unsigned(p.num_units)) return;
  if constexpr (kAligned) {
    acc_t<T> acc[V] = {};
    if constexpr (!kPlain) begin_sum<acc_t<T>, V>(p.epilogue, int64_t(unit) * V, V, acc);
    Raw<T> raw[ROWS];
    int hits = 0;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool valid = p.rows.covers(r, unit);
      raw[r] = load_streaming<T>(p.rows.origin(r) + uint64_t(unit) * kVecBytes<T>, valid);
      if (!kPlain) hits += valid;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add_vector<T>(acc, raw[r]);
    if constexpr (kPlain) {
      store_vector(static_cast<T*>(p.out) + uint64_t(unit) * V, acc);
    } else {
      int count[V];
#pragma unroll
      for (int j = 0; j < V; ++j) count[j] = hits;
      finish<acc_t<T>, V>(p.epilogue, int64_t(unit) * V, V, acc, count);
    }
  } else {
    T value[kItems][ROWS];
    int count[1] = {};
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned at = unit + i * kFewThreads;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const bool valid = p.rows.covers(r, at);
        value[i][r] = load_element(reinterpret_cast<const T*>(p.rows.origin(r)) + at, valid);
        if (!kPlain) count[0] += valid;
      }
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned at = unit + i * kFewThreads;
      acc_t<T> acc[1] = {};
      if constexpr (!kPlain) begin_sum<acc_t<T>, 1>(p.epilogue, at, 1, acc);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[0] = add(acc[0], to_acc(value[i][r]));
      if constexpr (!kPlain)
        finish<acc_t<T>, 1>(p.epilogue, at, 1, acc, count);
      else if (i == 0 || at < unsigned(p.num_units))
        static_cast<T*>(p.out)[at] = round_to<T>(acc[0]);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kManyThreads, 1) sum_many_rows_kernel(const __grid_constant__ RowsParams p) {
  constexpr int kWarps = kManyThreads / 32, kInFlight = 8;
  __shared__ acc_t<T> values[kManyRows][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unit = blockIdx.x * 32 + lane;
  const auto load = [&](int r) {
    return p.device.lengths == nullptr ? p.rows[r] : load_device_row<T, int(sizeof(T))>(p, r);
  };
  const int per_warp = (p.num_rows + kWarps - 1) / kWarps;  // neighbours: their bounds share cache lines
  const int end = min((warp + 1) * per_warp, p.num_rows);
  for (int r0 = warp * per_warp; r0 < end; r0 += kInFlight) {
    T value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int r = min(r0 + i, end - 1);
      const RowRange row = load(r);
      value[i] = load_element(reinterpret_cast<const T*>(row.origin) + unit,
                              r == r0 + i && row.begin <= unit && unit < row.end);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (r0 + i < end) values[r0 + i][lane] = to_acc(value[i]);
  }
  __syncthreads();
  if (warp > 0 || unit >= p.num_units) return;
  acc_t<T> acc[1] = {};
  int count[1] = {};
  begin_sum<acc_t<T>, 1>(p.epilogue, unit, 1, acc);
#pragma unroll 16
  for (int r = 0; r < p.num_rows; ++r) acc[0] = add(acc[0], values[r][lane]);
  if constexpr (accumulates_in_float_v<T>) {
    if (p.epilogue.direct) {
      static_cast<T*>(p.epilogue.out)[unit] = round_to<T>(acc[0]);
      return;
    }
  }
  if (p.epilogue.mean) {
    for (int r = 0; r < p.num_rows; ++r) {
      const RowRange row = load(r);
      count[0] += row.begin <= unit && unit < row.end;
    }
  }
  finish<acc_t<T>, 1>(p.epilogue, unit, 1, acc, count);
}

}  // namespace shardsum
