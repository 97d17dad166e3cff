// The end of a sum over peer memory: counts, cut vectors, and the pairs of dtypes.
#pragma once
#include "block.cuh"

namespace shardsum {

// One more contribution to the elements of the vector at `at` that lie in [lo, hi).
template <int V, typename Index>
__device__ __forceinline__ void count_vector(int (&count)[V], Index at, Index lo, Index hi) {
#pragma unroll
  for (int j = 0; j < V; ++j) count[j] += at + j >= lo && at + j < hi;
}

// Divides, scales, rounds and stores those elements of the vector at `at` that lie in [lo, hi). e.out is where element
// 0 goes, which lies before the output where that begins inside the vector.
template <typename A, int V, typename Index>
__device__ __forceinline__ void finish_part(const Epilogue& e, Index at, Index lo, Index hi, A (&acc)[V],
                                            int (&count)[V]) {
  const Index begin = max(at, lo), end = min(at + V, hi);
#pragma unroll 1
  for (int skip = int(begin - at); skip > 0; --skip) {
#pragma unroll
    for (int j = 0; j + 1 < V; ++j) acc[j] = acc[j + 1], count[j] = count[j + 1];
  }
  finish<A, V>(e, begin, int(end - begin), acc, count);
}

// F(index, T, Out, in, out): the pairs of dtypes that have a sum.
#define SHARDSUM_PEER_KINDS(F)                             \
  F(0, __nv_bfloat16, __nv_bfloat16, kBFloat16, kBFloat16) \
  F(1, __nv_bfloat16, float, kBFloat16, kFloat32)          \
  F(2, __nv_bfloat16, __half, kBFloat16, kFloat16)         \
  F(3, __half, __half, kFloat16, kFloat16)                 \
  F(4, __half, float, kFloat16, kFloat32)                  \
  F(5, __half, __nv_bfloat16, kFloat16, kBFloat16)         \
  F(6, float, float, kFloat32, kFloat32)                   \
  F(7, float, __nv_bfloat16, kFloat32, kBFloat16)          \
  F(8, float, __half, kFloat32, kFloat16)                  \
  F(9, double, double, kFloat64, kFloat64)                 \
  F(10, double, float, kFloat64, kFloat32)                 \
  F(11, uint8_t, int64_t, kUInt8, kInt64)                  \
  F(12, int8_t, int64_t, kInt8, kInt64)                    \
  F(13, int16_t, int64_t, kInt16, kInt64)                  \
  F(14, int32_t, int64_t, kInt32, kInt64)                  \
  F(15, int64_t, int64_t, kInt64, kInt64)                  \
  F(16, Bool, int64_t, kBool, kInt64)

constexpr int kMoveKind = 17;

inline int kind_of(const PeerCall& c) {
  if (c.move) return kMoveKind;
#define SHARDSUM_FIND(index, T, Out, in, out) \
  if (c.in_dtype == DType::in && c.out_dtype == DType::out) return index;
  SHARDSUM_PEER_KINDS(SHARDSUM_FIND)
#undef SHARDSUM_FIND
  return -1;
}

}  // namespace shardsum
