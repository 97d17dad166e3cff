// The ragged sum of few rows into a small output, where a launch costs more than the bytes: one thread per vector (or
// element), every row loaded at once, bounds as kernel arguments, nothing in between.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kFewRows = 8;

// Positions in units (whole vectors, or elements), as in sum_rows.cuh; 32 bits are enough here.
template <int ROWS>
struct FewRowsParams {
  const char* origin[ROWS];
  int begin[ROWS], length[ROWS];  // unused rows have length 0
  int num_units;
  Epilogue epilogue;
};

template <typename T, bool kAligned, int ROWS>
__global__ void __launch_bounds__(128, 1) sum_few_rows_kernel(const __grid_constant__ FewRowsParams<ROWS> p) {
  const int unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= p.num_units) return;
  constexpr int V = kAligned ? kVec<T> : 1;
  acc_t<T> acc[V] = {};
  int count[V] = {};
  if constexpr (kAligned) {
    Raw<T> raw[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool valid = unsigned(unit - p.begin[r]) < unsigned(p.length[r]);
      raw[r] = load_streaming<T>(p.origin[r] + int64_t(unit) * kVecBytes<T>, valid);
      count[0] += valid;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) add_vector<T>(acc, raw[r]);
#pragma unroll
    for (int j = 1; j < V; ++j) count[j] = count[0];
  } else {
    acc_t<T> value[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const bool valid = unsigned(unit - p.begin[r]) < unsigned(p.length[r]);
      value[r] = valid ? to_acc(reinterpret_cast<const T*>(p.origin[r])[unit]) : acc_t<T>(0);
      count[0] += valid;
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[0] = add(acc[0], value[r]);
  }
  finish<acc_t<T>, V>(p.epilogue, int64_t(unit) * V, V, acc, count);
}

}  // namespace shardsum
