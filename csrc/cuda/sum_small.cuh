// The ragged sum into a small output, where latency counts and not bytes: as few dependent steps as possible.
//
// Few rows: one thread per vector (or element) holds all of them; bounds are plain kernel arguments.
// Many rows: a block takes 32 elements; its warps fetch the rows side by side into shared memory as accumulators, then
// one warp adds them in row order.
#pragma once
#include "sum_rows.cuh"

namespace shardsum {

constexpr int kFewRows = 8, kManyRows = 128;

template <int ROWS>
struct FewRowsParams {
  void* out;
  int num_units;
  int begin[ROWS], length[ROWS];  // in units; unused rows have length 0
  const char* origin[ROWS];
  Epilogue epilogue;
};

template <typename T, bool kAligned, bool kPlain, int ROWS>
__global__ void __launch_bounds__(128, 1) sum_few_rows_kernel(const __grid_constant__ FewRowsParams<ROWS> p) {
  constexpr int V = kAligned ? kVec<T> : 1;
  const unsigned unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= unsigned(p.num_units)) return;
  acc_t<T> acc[V] = {};
  int count[V] = {};
  if constexpr (kAligned) {
    Raw<T> raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool valid = unit - p.begin[r] < unsigned(p.length[r]);
      raw[r] = load_streaming<T>(p.origin[r] + uint64_t(unit) * kVecBytes<T>, valid);
      if (!kPlain) count[0] += valid;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add_vector<T>(acc, raw[r]);
#pragma unroll
    for (int j = 1; j < V; ++j) count[j] = count[0];
  } else {
    acc_t<T> value[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool valid = unit - p.begin[r] < unsigned(p.length[r]);
      value[r] = valid ? to_acc(reinterpret_cast<const T*>(p.origin[r])[unit]) : acc_t<T>(0);
      if (!kPlain) count[0] += valid;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[0] = add(acc[0], value[r]);
  }
  if constexpr (!kPlain) finish<acc_t<T>, V>(p.epilogue, int64_t(unit) * V, V, acc, count);
  else if constexpr (kAligned) store_vector(static_cast<T*>(p.out) + uint64_t(unit) * V, acc);
  else static_cast<T*>(p.out)[unit] = round_to<T>(acc[0]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_many_rows_kernel(const __grid_constant__ RowsParams p) {
  constexpr int kWarps = kThreads / 32, kInFlight = 8;
  __shared__ acc_t<T> values[kManyRows][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unit = blockIdx.x * 32 + lane;
  for (int r0 = warp; r0 < p.num_rows; r0 += kWarps * kInFlight) {
    acc_t<T> value[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int r = r0 + i * kWarps;
      value[i] = 0;
      if (r < p.num_rows && p.rows[r].begin <= unit && unit < p.rows[r].end)
        value[i] = to_acc(reinterpret_cast<const T*>(p.rows[r].origin)[unit]);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (r0 + i * kWarps < p.num_rows) values[r0 + i * kWarps][lane] = value[i];
  }
  __syncthreads();
  if (warp > 0 || unit >= p.num_units) return;
  acc_t<T> acc[1] = {};
  int count[1] = {};
#pragma unroll 16
  for (int r = 0; r < p.num_rows; ++r) acc[0] = add(acc[0], values[r][lane]);
  if (p.epilogue.mean)
    for (int r = 0; r < p.num_rows; ++r) count[0] += p.rows[r].begin <= unit && unit < p.rows[r].end;
  finish<acc_t<T>, 1>(p.epilogue, unit, 1, acc, count);
}

}  // namespace shardsum
