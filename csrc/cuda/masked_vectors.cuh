// Masked sums over positions of any width. A thread owns one vector; it reads the masks of several rows, then those
// vectors of which any element takes part.
#pragma once
#include "masked_sum.cuh"

namespace shardsum {

constexpr int kMaskedThreads = 256;

__device__ inline bool mask_at(const Mask& m, int r, int64_t position) {
  if (m.bits) return static_cast<const uint32_t*>(m.data)[r * m.stride + (position >> 5)] >> (position & 31) & 1;
  return static_cast<const uint8_t*>(m.data)[r * m.stride + position] != 0;
}

// Which elements of a vector take part: byte j is 0xff or 0.
template <int V>
struct Select {
  uint32_t w[(V + 3) / 4];

  __device__ bool any() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < (V + 3) / 4; ++i) bits |= w[i];
    return bits != 0;
  }
};

template <int V>
__device__ inline Select<V> select_bits(unsigned bits) {
  Select<V> s;
#pragma unroll
  for (int i = 0; i < (V + 3) / 4; ++i) s.w[i] = ((bits >> (4 * i) & 0xf) * 0x00204081u & 0x01010101u) * 0xffu;
  return s;
}

// Where a thread's vector lies: elements [first, first + num) from element `rest` of `position` on.
struct Place {
  int64_t first, position, rest;
  int num;
};

// The selections of ROWS rows from r0 on (none past the last row); their loads overlap. Every branch is the same for
// all threads but those with a partial vector.
template <int V, int ROWS>
__device__ inline void load_selects(const MaskedParams& p, int r0, const Place& at, Select<V> (&s)[ROWS]) {
  const char* mask = static_cast<const char*>(p.mask.data);
  if (p.width == 1 && p.mask.bits) {  // V divides 32: one word
    const char* words = mask + (at.first >> 5) * 4;
    uint32_t bits[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      bits[i] =
          load_element(reinterpret_cast<const uint32_t*>(words + (r0 + i) * p.mask.stride * 4), r0 + i < p.num_rows);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) s[i] = select_bits<V>(bits[i] >> (at.first & 31) & ((1u << at.num) - 1));
  } else if (V >= 4 && p.width == 1 && p.mask_words && at.num == V) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int w = 0; w < V / 4; ++w)
        s[i].w[w] = load_element(reinterpret_cast<const uint32_t*>(mask + (r0 + i) * p.mask.stride + at.first) + w,
                                 r0 + i < p.num_rows);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
      for (int w = 0; w < V / 4; ++w) s[i].w[w] = __vcmpne4(s[i].w[w], 0);
  } else if (at.rest + at.num <= p.width) {  // one position: the byte that holds its byte or bit
    const int shift = p.mask.bits ? at.position & 7 : 0;
    const char* bytes = mask + (p.mask.bits ? at.position >> 3 : at.position);
    const int64_t stride = p.mask.bits ? p.mask.stride * 4 : p.mask.stride;
    const unsigned which = p.mask.bits ? 1 : 0xff;
    uint8_t byte[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      byte[i] = load_element(reinterpret_cast<const uint8_t*>(bytes + (r0 + i) * stride), r0 + i < p.num_rows);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) s[i] = select_bits<V>(byte[i] >> shift & which ? ~0u : 0u);
  } else {
    for (int i = 0; i < ROWS; ++i) {
      unsigned bits = 0;
      int64_t position = at.position, rest = at.rest;
      for (int j = 0; j < at.num && r0 + i < p.num_rows; ++j) {
        bits |= unsigned(mask_at(p.mask, r0 + i, position)) << j;
        if (++rest == p.width) rest = 0, ++position;
      }
      s[i] = select_bits<V>(bits);
    }
  }
}

// Zeros where an element does not take part: adding them changes no bit.
template <typename T>
__device__ inline void apply(Raw<T>& raw, const Select<kVec<T>>& s) {
#pragma unroll
  for (int i = 0; i < kVecBytes<T> / 4; ++i) {
    if constexpr (sizeof(T) == 1)
      raw.w[i] &= s.w[i];
    else if constexpr (sizeof(T) == 2)
      raw.w[i] &= __byte_perm(s.w[i / 2], 0, i % 2 ? 0x3322 : 0x1100);
    else if constexpr (sizeof(T) == 4)
      raw.w[i] &= __byte_perm(s.w[0], 0, 0x1111 * i);
    else
      raw.w[i] &= __byte_perm(s.w[0], 0, 0x1111 * (i / 2));
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaskedThreads, 4) masked_vectors_kernel(const __grid_constant__ MaskedParams p) {
  constexpr int V = kVec<T>, ROWS = 4;
  const int64_t total = p.size * p.width;
  Place at;
  at.first = (int64_t(blockIdx.x) * kMaskedThreads + threadIdx.x) * V;
  if (at.first >= total) return;
  at.num = int(min(int64_t(V), total - at.first));
  at.position = p.width == 1 ? at.first : total >> 32 ? at.first / p.width : unsigned(at.first) / unsigned(p.width);
  at.rest = at.first - at.position * p.width;
  // Whole sectors can be skipped only where a position fills one; else waiting for the mask would gain nothing.
  const bool skip = p.width * int64_t(sizeof(T)) >= 32;
  acc_t<T> acc[V] = {};
  int count[V] = {};
  for (int r0 = 0; r0 < p.num_rows; r0 += ROWS) {
    Raw<T> raw[ROWS];
    Select<V> selected[ROWS];
    load_selects<V, ROWS>(p, r0, at, selected);
    const char* data = p.data + r0 * p.row_bytes + at.first * int64_t(sizeof(T));
    bool load[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i) load[i] = skip ? selected[i].any() : r0 + i < p.num_rows;
    if (p.aligned && at.num == V) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) raw[i] = load_streaming<T>(data + i * p.row_bytes, load[i]);
    } else {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) raw[i] = load_any<T>(data + i * p.row_bytes, 0, load[i] ? at.num : 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      apply(raw[i], selected[i]);
      add_vector<T>(acc, raw[i]);
      if (p.epilogue.mean) {
#pragma unroll
        for (int j = 0; j < V; ++j) count[j] += selected[i].w[j / 4] >> (j % 4 * 8) & 1;
      }
    }
  }
  finish<acc_t<T>, V>(p.epilogue, at.first, at.num, acc, count);
}

}  // namespace shardsum
