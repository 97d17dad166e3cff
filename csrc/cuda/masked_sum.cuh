// The masked sum: x is (R, size, width), mask[r, p] selects position p of row r. Any R in one launch.
//
// masked_columns_kernel: wide positions of whole vectors. A column is 32 vectors side by side, a warp takes a few of
// them. Its lanes read the masks of all their rows at once and list what is selected, column by column and row by row
// of each; only that is loaded, kInFlight items at a time whatever column they belong to, and added in the order of the
// list. masked_vectors_kernel: everything else. A thread owns one vector; it reads the masks of several rows, then
// those vectors of which any element takes part.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaskedThreads = 256;
constexpr int kColumnWarps = 2;              // of a block: what waits for the slowest warp is small
constexpr int kInFlight = 8, kTogether = 4;  // items of a warp; of them, so many behind one branch
constexpr int kMasks = 64, kItems = 64;      // masks that a warp reads at once, items that come of them at most

struct MaskedParams {
  Epilogue epilogue;
  const char* data;
  int64_t row_bytes;  // from one row of x to the next
  Mask mask;
  int num_rows;
  int64_t size, width;
  // masked_vectors_kernel: every vector of x is aligned; a row's mask bytes can be read four at a time
  bool aligned, mask_words;
  // masked_columns_kernel
  unsigned num_vectors, vectors_per_position;
  unsigned division, division_shift;  // v / vectors_per_position is the upper word of v * division, shifted down
  int columns;                        // of a warp
  int row_shift, row_mask;            // of its masks, (c << row_shift) + r is row r's of column c
  int num_masks;
  bool wide;           // its columns lie in one position: the first one's masks are all
  int64_t mask_bytes;  // from one row to the next; a mask is mask_which of byte p >> mask_shift, p & mask_low bits up
  unsigned mask_shift, mask_low, mask_which;
};

__device__ inline bool mask_at(const Mask& m, int r, int64_t position) {
  if (m.bits) return static_cast<const uint32_t*>(m.data)[r * m.stride + (position >> 5)] >> (position & 31) & 1;
  return static_cast<const uint8_t*>(m.data)[r * m.stride + position] != 0;
}

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
