// Masked sums over wide positions. A column is 32 vectors side by side, a warp takes a few of them. Its lanes read the
// masks of all their rows at once and list what is selected, column by column and row by row of each; only that is
// loaded, kInFlight items at a time whatever column they belong to, and added in the order of the list.
#pragma once
#include "masked_sum.cuh"

namespace shardsum {

constexpr int kColumnWarps = 2;              // of a block: what waits for the slowest warp is small
constexpr int kInFlight = 8, kTogether = 4;  // items of a warp; of them, so many behind one branch
constexpr int kMasks = 64, kItems = 64;      // masks that a warp reads at once, items that come of them at most

// One row's part of a column.
struct alignas(16) Item {
  const char* from;  // lane 0's vector
  unsigned lanes;    // those that it contributes to, as bits
  int column;
};

__device__ inline Item load_item(const Item* p) {  // in one piece
  const int4 v = *reinterpret_cast<const int4*>(p);
  Item item;
  memcpy(&item, &v, sizeof(item));
  return item;
}

__device__ inline void store_item(Item* p, const Item& item) {
  int4 v;
  memcpy(&v, &item, sizeof(item));
  *reinterpret_cast<int4*>(p) = v;
}

// A column's first position and the lanes of it; the others, if any, are of the next one.
struct ColumnPlace {
  unsigned position, lanes;

  __device__ ColumnPlace(const MaskedParams& p, unsigned column) {
    const unsigned vector = column * 32;
    position = __umulhi(vector, p.division) >> p.division_shift;
    lanes = ~0u >> (32 - min((position + 1) * p.vectors_per_position - vector, 32u));
  }
};

// The byte that holds a mask, or 0; and the mask in it.
__device__ inline uint8_t load_mask(const MaskedParams& p, unsigned row, unsigned position, bool valid) {
  const uint64_t at = uint64_t(p.mask_bytes) * row + (position >> p.mask_shift);
  return load_element(static_cast<const uint8_t*>(p.mask.data) + at, valid && position < unsigned(p.size));
}
__device__ inline unsigned mask_of(const MaskedParams& p, uint8_t byte, unsigned position) {
  return byte >> (position & p.mask_low) & p.mask_which;
}

// Lists what the masks [m0, m0 + kMasks) of the columns from `first` on select; the number of items. One warp.
template <typename T>
__device__ inline int list_items(const MaskedParams& p, unsigned first, int m0, Item* list) {
  constexpr int kWords = kMasks / 32, kColumnBytes = 32 * kVecBytes<T>;
  const int lane = threadIdx.x % 32;
  const auto column_of = [&](int k) { return (m0 + k * 32 + lane) >> p.row_shift; };
  const auto row_of = [&](int k) { return (m0 + k * 32 + lane) & p.row_mask; };
  const auto exists = [&](int k) { return m0 + k * 32 + lane < p.num_masks && row_of(k) < p.num_rows; };
  uint8_t here[kWords], next[kWords] = {};
#pragma unroll
  for (int k = 0; k < kWords; ++k)
    here[k] = load_mask(p, row_of(k), ColumnPlace(p, first + column_of(k)).position, exists(k));
  if (p.vectors_per_position % 32 != 0) {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      const ColumnPlace at(p, first + column_of(k));
      next[k] = load_mask(p, row_of(k), at.position + 1, exists(k) && at.lanes != ~0u);
    }
  }
  unsigned listed[kWords], lanes[kWords];
  int n = 0, before = 0;
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const ColumnPlace at(p, first + column_of(k));
    lanes[k] =
        (mask_of(p, here[k], at.position) ? at.lanes : 0) | (mask_of(p, next[k], at.position + 1) ? ~at.lanes : 0);
    listed[k] = __ballot_sync(0xffffffffu, lanes[k] != 0);
    n += __popc(listed[k]);
  }
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    if (lanes[k] != 0) {
      int c = column_of(k), at = before + __popc(listed[k] & ((1u << lane) - 1));
      const char* from = p.data + row_of(k) * p.row_bytes + int64_t(first + c) * kColumnBytes;
      store_item(&list[at], {from, lanes[k], c});
      if (p.wide) {
#pragma unroll 1
        while (++c < p.columns) store_item(&list[at += n], {from += kColumnBytes, ~0u, c});
      }
    }
    before += __popc(listed[k]);
  }
  if (p.wide) n *= p.columns;
  if (lane < kTogether) list[n + lane].lanes = 0;
  return n;
}

// kDirect: nothing but the sum, in the rows' dtype.
template <typename T, bool kDirect>
__global__ void __launch_bounds__(kColumnWarps * 32, 16) masked_columns_kernel(const __grid_constant__ MaskedParams p) {
  constexpr int V = kVec<T>;
  __shared__ Item lists[kColumnWarps][kItems + kTogether];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned first = (blockIdx.x * kColumnWarps + warp) * p.columns;
  if (first * 32 >= p.num_vectors) return;
  Item* list = lists[warp];
  acc_t<T> acc[V] = {};
  int current = 0, hits = 0;
  const auto store_up_to = [&](int column) {  // columns of no item too
#pragma unroll 1
    do {
      const unsigned vector = (first + current) * 32 + lane;
      if (vector < p.num_vectors) {
        if constexpr (kDirect) {
          store_vector(static_cast<T*>(p.epilogue.out) + int64_t(vector) * V, acc);
        } else {
          int count[V];
#pragma unroll
          for (int j = 0; j < V; ++j) count[j] = hits;
          finish<acc_t<T>, V>(p.epilogue, int64_t(vector) * V, V, acc, count);
        }
      }
#pragma unroll
      for (int j = 0; j < V; ++j) acc[j] = 0;
      hits = 0;
    } while (++current < column);
  };
  for (int m0 = 0; m0 < p.num_masks; m0 += kMasks) {
    if (m0 > 0) __syncwarp();
    const int n = list_items<T>(p, first, m0, list);
    __syncwarp();
    for (int k = 0; k < n; k += kInFlight) {
      Raw<T> raw[kInFlight];
      unsigned inside = 0;
#pragma unroll
      for (int j = 0; j < kInFlight; j += kTogether) {
        if (k + j >= n) break;
#pragma unroll
        for (int i = j; i < j + kTogether; ++i) {
          const Item item = load_item(&list[k + i]);
          const bool in = (item.lanes & 1u << lane) != 0;
          raw[i] = load_streaming<T>(item.from + lane * kVecBytes<T>, in);
          if (!kDirect) inside |= unsigned(in) << i;
        }
      }
#pragma unroll
      for (int j = 0; j < kInFlight; j += kTogether) {
        if (k + j >= n) break;
        int column[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) column[i] = list[k + j + i].column;
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (k + j + i >= n) break;
          if (column[i] != current) store_up_to(column[i]);
          add_vector<T>(acc, raw[j + i]);
          if (!kDirect) hits += inside >> (j + i) & 1;
        }
      }
    }
  }
  store_up_to(p.columns);
}

}  // namespace shardsum
