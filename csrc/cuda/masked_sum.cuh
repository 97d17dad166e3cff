// The masked sum: x is (R, size, width), mask[r, p] selects position p of row r. Any R in one launch.
//
// masked_columns_kernel: wide positions of whole vectors. A column is up to 32 vectors of one position, a warp takes
// kColumns of them. Lane r reads row r's mask, a ballot gives the rows that take part, and only those are loaded, in row
// order, ROWS rows x COLS columns at a time: the fewer rows take part, the more columns are in flight.
// masked_vectors_kernel: everything else. A thread owns one vector; it reads the masks of several rows, then those
// vectors of which any element takes part.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaskedThreads = 256;
constexpr int kMaskedWarps = kMaskedThreads / 32;
constexpr int kColumns = 4;

struct MaskedParams {
  Epilogue epilogue;
  const char* data;
  int64_t row_bytes;  // from one row of x to the next
  Mask mask;
  int num_rows;
  int64_t size, width;
  // masked_columns_kernel
  int vectors_per_position, columns_per_position;
  unsigned num_columns;
};

__device__ inline bool mask_at(const Mask& m, int r, int64_t position) {
  if (m.bits) return static_cast<const uint32_t*>(m.data)[r * m.stride + (position >> 5)] >> (position & 31) & 1;
  return static_cast<const uint8_t*>(m.data)[r * m.stride + position] != 0;
}

// One column of a warp: its position and this lane's vector in it.
struct Column {
  int64_t position;
  int64_t vector;  // of the output
  bool exists;     // this lane's vector does

  // Bit r: row r0 + r takes part.
  __device__ unsigned rows(const MaskedParams& p, int r0) const {
    const int r = r0 + threadIdx.x % 32;
    return __ballot_sync(0xffffffffu, r < p.num_rows && position < p.size && mask_at(p.mask, r, position));
  }
};

// The columns [0, COLS) with at most ROWS rows each, all below 32; or one column of any number of rows.
template <typename T, bool kPlain, int ROWS, int COLS>
__device__ inline void sum_columns(const MaskedParams& p, const Column* columns, const unsigned* rows) {
  constexpr int V = kVec<T>;
  Raw<T> raw[ROWS > 0 ? ROWS : 1][COLS];
  int hits[COLS];
  unsigned left[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c) hits[c] = __popc(left[c] = rows[c]);
  const auto load_piece = [&](int r0) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int r = __ffs(left[c]) - 1;
        raw[i][c] = load_streaming<T>(p.data + (r0 + r) * p.row_bytes + columns[c].vector * kVecBytes<T>,
                                      (left[c] != 0) & columns[c].exists);
        left[c] &= left[c] - 1;
      }
    }
  };
  load_piece(0);
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    acc_t<T> acc[V] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][c]);
    if constexpr (COLS == 1 && ROWS > 0) {
      for (int r0 = 0;;) {
        while (left[0]) {
          load_piece(r0);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][0]);
        }
        if ((r0 += 32) >= p.num_rows) break;
        left[0] = columns[0].rows(p, r0);
        hits[0] += __popc(left[0]);
      }
    }
    if (!columns[c].exists) continue;
    if constexpr (kPlain) {
      store_vector(static_cast<T*>(p.epilogue.out) + columns[c].vector * V, acc);
    } else {
      int count[V];
#pragma unroll
      for (int j = 0; j < V; ++j) count[j] = hits[c];
      finish<acc_t<T>, V>(p.epilogue, columns[c].vector * V, V, acc, count);
    }
  }
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMaskedThreads, 4) masked_columns_kernel(const __grid_constant__ MaskedParams p) {
  const unsigned first = (blockIdx.x * kMaskedWarps + threadIdx.x / 32) * kColumns;
  if (first >= p.num_columns) return;
  Column columns[kColumns];
  unsigned rows[kColumns];
  unsigned position = first / p.columns_per_position;
  int part = first - position * p.columns_per_position;
  int most = 0;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int vector = part * 32 + threadIdx.x % 32;
    columns[c] = {position, int64_t(position) * p.vectors_per_position + vector,
                  position < p.size && vector < p.vectors_per_position};
    rows[c] = columns[c].rows(p, 0);
    most = max(most, __popc(rows[c]));
    if (++part == p.columns_per_position) part = 0, ++position;
  }
  if (most > 4 || p.num_rows > 32) {
#pragma unroll 1
    for (int c = 0; c < kColumns; ++c) {
      sum_columns<T, kPlain, 8, 1>(p, columns, rows);
#pragma unroll
      for (int i = 0; i + 1 < kColumns; ++i) columns[i] = columns[i + 1], rows[i] = rows[i + 1];
    }
  } else if (most > 2) {
    sum_columns<T, kPlain, 4, 2>(p, columns, rows);
    sum_columns<T, kPlain, 4, 2>(p, columns + 2, rows + 2);
  } else {
    sum_columns<T, kPlain, 2, 4>(p, columns, rows);
  }
}

// Which elements of a vector take part: byte j is 0xff or 0.
template <int V>
struct Select {
  uint32_t w[(V + 3) / 4];
};

template <int V>
__device__ inline Select<V> select_bits(unsigned bits) {
  Select<V> s;
#pragma unroll
  for (int i = 0; i < (V + 3) / 4; ++i) s.w[i] = ((bits >> (4 * i) & 0xf) * 0x00204081u & 0x01010101u) * 0xffu;
  return s;
}

template <int V>
__device__ inline Select<V> select_elements(const MaskedParams& p, int r, int64_t first, int64_t position, int64_t rest,
                                            int num) {
  const bool bits = p.mask.bits;
  if (p.width == 1 && bits) {  // V divides 32: one word
    const uint32_t word = static_cast<const uint32_t*>(p.mask.data)[r * p.mask.stride + (first >> 5)];
    return select_bits<V>(word >> (first & 31) & ((1u << num) - 1));
  }
  if (p.width == 1 && V >= 4 && num == V) {
    const uint8_t* bytes = static_cast<const uint8_t*>(p.mask.data) + r * p.mask.stride + first;
    if (reinterpret_cast<uintptr_t>(bytes) % 4 == 0) {
      Select<V> s;
#pragma unroll
      for (int i = 0; i < V / 4; ++i) s.w[i] = __vcmpne4(reinterpret_cast<const uint32_t*>(bytes)[i], 0);
      return s;
    }
  }
  if (rest + num <= p.width) return select_bits<V>(mask_at(p.mask, r, position) ? ~0u : 0u);
  unsigned selected = 0;
  for (int j = 0; j < num; ++j) {
    selected |= unsigned(mask_at(p.mask, r, position)) << j;
    if (++rest == p.width) rest = 0, ++position;
  }
  return select_bits<V>(selected);
}

// Zeros where an element does not take part: adding them changes no bit.
template <typename T>
__device__ inline void apply(Raw<T>& raw, const Select<kVec<T>>& s) {
#pragma unroll
  for (int i = 0; i < kVecBytes<T> / 4; ++i) {
    if constexpr (sizeof(T) == 1) raw.w[i] &= s.w[i];
    else if constexpr (sizeof(T) == 2) raw.w[i] &= __byte_perm(s.w[i / 2], 0, i % 2 ? 0x3322 : 0x1100);
    else if constexpr (sizeof(T) == 4) raw.w[i] &= __byte_perm(s.w[0], 0, 0x1111 * i);
    else raw.w[i] &= __byte_perm(s.w[0], 0, 0x1111 * (i / 2));
  }
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMaskedThreads, 3) masked_vectors_kernel(const __grid_constant__ MaskedParams p) {
  constexpr int V = kVec<T>, ROWS = kVecBytes<T> == 16 && V == 8 ? 4 : 8;
  const int64_t total = p.size * p.width;
  const int64_t first = (int64_t(blockIdx.x) * kMaskedThreads + threadIdx.x) * V;
  if (first >= total) return;
  const int num = int(min(int64_t(V), total - first));
  const int64_t position = p.width == 1 ? first : total >> 32 ? first / p.width : unsigned(first) / unsigned(p.width);
  const int64_t rest = first - position * p.width;
  acc_t<T> acc[V] = {};
  int count[V] = {};
  for (int r0 = 0; r0 < p.num_rows; r0 += ROWS) {
    Raw<T> raw[ROWS];
    Select<V> selected[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
      selected[i] = r0 + i < p.num_rows ? select_elements<V>(p, r0 + i, first, position, rest, num) : Select<V>{};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      bool any = false;
#pragma unroll
      for (int w = 0; w < (V + 3) / 4; ++w) any |= selected[i].w[w] != 0;
      raw[i] = load_any<T>(p.data + (r0 + i) * p.row_bytes + first * int64_t(sizeof(T)), 0, any ? num : 0);
      apply(raw[i], selected[i]);
      if (!kPlain && p.epilogue.mean) {
#pragma unroll
        for (int j = 0; j < V; ++j) count[j] += selected[i].w[j / 4] >> (j % 4 * 8) & 1;
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i]);
  }
  if constexpr (kPlain) store<T>(p.epilogue, first, num, acc);
  else finish<acc_t<T>, V>(p.epilogue, first, num, acc, count);
}

}  // namespace shardsum
