// The masked sum: x is (R, size, width), mask[r, p] selects position p of row r. Any R in one launch.
//
// masked_vectors_kernel: a vector never crosses a position (width is a multiple of it). A warp takes tiles of tile_cols
// columns of 32 vectors; lane r reads row r's mask for a column, a ballot gives the rows that take part, and only those
// are loaded, up to eight at a time (ROWS rows x COLS columns), in row order.
// masked_elements_kernel: everything else (width 1, odd widths, odd addresses). A lane owns one vector and reads mask
// and data of every row side by side: skipping single elements would save no traffic.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaskedThreads = 256;
constexpr int kMaskedWarps = kMaskedThreads / 32;
constexpr int kMaskedBlocksPerSM = 4;

struct MaskedParams {
  Epilogue epilogue;
  const char* data;
  int64_t row_bytes;  // from one row of x to the next
  Mask mask;
  int64_t num_rows, size, width;
  int64_t vectors_per_position;  // masked_vectors_kernel
  int64_t num_vectors;           // of the output, the last may be partial
  int64_t num_tiles;
  int tile_cols;
};

__device__ inline unsigned mask_bit(const Mask& m, int64_t r, int64_t position) {
  if (m.bits) return static_cast<const uint32_t*>(m.data)[r * m.stride + (position >> 5)] >> (position & 31) & 1;
  return static_cast<const uint8_t*>(m.data)[r * m.stride + position] != 0;
}

// A column of 32 vectors and where its positions begin. It spans at most 32 positions.
struct Column {
  int64_t vector;     // the first
  int64_t position;   // of the first vector
  int num_positions;  // that the column touches
  int own;            // which of them this lane's vector belongs to
  bool exists;        // this lane's vector does

  __device__ Column(const MaskedParams& p, int64_t first) : vector(first) {
    const int lane = threadIdx.x % 32;
    exists = first + lane < p.num_vectors;
    position = first / p.vectors_per_position;
    const int64_t rest = first - position * p.vectors_per_position;
    if (p.vectors_per_position >= 32) {
      own = rest + lane >= p.vectors_per_position;
      num_positions = 1 + (rest + 31 >= p.vectors_per_position);
    } else {
      own = unsigned(rest + lane) / unsigned(p.vectors_per_position);
      num_positions = 1 + unsigned(rest + 31) / unsigned(p.vectors_per_position);
    }
    num_positions = int(max(min(int64_t(num_positions), p.size - position), int64_t(0)));
  }

  // Bit k: row r takes part at position + k.
  __device__ unsigned row_bits(const MaskedParams& p, int64_t r) const {
    unsigned bits = 0;
    if (r < p.num_rows)
      for (int k = 0; k < num_positions; ++k) bits |= mask_bit(p.mask, r, position + k) << k;
    return bits;
  }
};

// COLS columns of at most ROWS rows each out of the first 32, or one column of any number of rows.
template <typename T, int ROWS, int COLS>
__device__ inline void sum_columns(const MaskedParams& p, const Column (&columns)[COLS], const unsigned (&first_bits)[COLS]) {
  constexpr int V = kVec<T>;
  const int lane = threadIdx.x % 32;
  Raw<T> raw[ROWS][COLS];
  int hits[COLS] = {};
  unsigned left[COLS], bits[COLS];
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    bits[c] = first_bits[c];
    left[c] = __ballot_sync(0xffffffffu, bits[c] != 0);
  }
  const auto load_block = [&](int64_t r0) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < COLS; ++c) {
        const int r = left[c] ? __ffs(left[c]) - 1 : 0;
        const bool valid = (left[c] != 0) & (__shfl_sync(0xffffffffu, bits[c], r) >> columns[c].own & 1) & columns[c].exists;
        left[c] &= left[c] - 1;
        raw[i][c] = load_streaming<T>(p.data + (r0 + r) * p.row_bytes + (columns[c].vector + lane) * kVecBytes<T>, valid);
        hits[c] += valid;
      }
    }
  };
  load_block(0);
#pragma unroll
  for (int c = 0; c < COLS; ++c) {
    const int64_t element = (columns[c].vector + lane) * V;
    const int num = columns[c].exists ? V : 0;
    acc_t<T> acc[V] = {};
#pragma unroll
    for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][c]);
    if constexpr (COLS == 1) {
      for (int64_t r0 = 0;;) {
        while (left[0]) {
          load_block(r0);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][0]);
        }
        r0 += 32;
        if (r0 >= p.num_rows) break;
        bits[0] = columns[0].row_bits(p, r0 + lane);
        left[0] = __ballot_sync(0xffffffffu, bits[0] != 0);
      }
    }
    if (num == 0) continue;
    int count[V];
#pragma unroll
    for (int j = 0; j < V; ++j) count[j] = hits[c];
    finish<acc_t<T>, V>(p.epilogue, element, num, acc, count);
  }
}

template <typename T, int ROWS, int COLS>
__device__ inline void sum_column_groups(const MaskedParams& p, int64_t tile) {
  const int lane = threadIdx.x % 32;
  for (int col = 0; col < p.tile_cols; col += COLS) {
    if constexpr (COLS == 1) {
      const Column columns[1] = {Column(p, (tile * p.tile_cols + col) * 32)};
      const unsigned bits[1] = {columns[0].row_bits(p, lane)};
      sum_columns<T, ROWS, 1>(p, columns, bits);
    } else if constexpr (COLS == 2) {
      const int64_t v = (tile * p.tile_cols + col) * 32;
      const Column columns[2] = {Column(p, v), Column(p, v + 32)};
      const unsigned bits[2] = {columns[0].row_bits(p, lane), columns[1].row_bits(p, lane)};
      sum_columns<T, ROWS, 2>(p, columns, bits);
    } else {
      const int64_t v = (tile * p.tile_cols + col) * 32;
      const Column columns[4] = {Column(p, v), Column(p, v + 32), Column(p, v + 64), Column(p, v + 96)};
      const unsigned bits[4] = {columns[0].row_bits(p, lane), columns[1].row_bits(p, lane), columns[2].row_bits(p, lane),
                                columns[3].row_bits(p, lane)};
      sum_columns<T, ROWS, 4>(p, columns, bits);
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaskedThreads, kMaskedBlocksPerSM)
    masked_vectors_kernel(const __grid_constant__ MaskedParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t step = int64_t(gridDim.x) * kMaskedWarps;
  for (int64_t tile = int64_t(blockIdx.x) * kMaskedWarps + threadIdx.x / 32; tile < p.num_tiles; tile += step) {
    int most = 0;
    if (p.num_rows <= 32 && p.tile_cols == 4) {
      for (int c = 0; c < 4; ++c) {
        const Column column(p, (tile * 4 + c) * 32);
        most = max(most, __popc(__ballot_sync(0xffffffffu, column.row_bits(p, lane) != 0)));
      }
    } else {
      most = 32;
    }
    if (most > 4) sum_column_groups<T, 8, 1>(p, tile);
    else if (most > 2) sum_column_groups<T, 4, 2>(p, tile);
    else sum_column_groups<T, 2, 4>(p, tile);
  }
}

// Bit j: row r takes part at the position of element first + j, j < num.
template <int V>
__device__ inline unsigned element_bits(const MaskedParams& p, int64_t r, int64_t first, int64_t position, int64_t rest,
                                        int num) {
  if (p.width == 1) {
    if (p.mask.bits)  // V divides 32, so the bits are in one word
      return static_cast<const uint32_t*>(p.mask.data)[r * p.mask.stride + (first >> 5)] >> (first & 31) & ((1u << num) - 1);
    const uint8_t* bytes = static_cast<const uint8_t*>(p.mask.data) + r * p.mask.stride + first;
    unsigned bits = 0;
    if (V >= 4 && num == V && reinterpret_cast<uintptr_t>(bytes) % V == 0) {
      uint32_t words[V / 4 > 0 ? V / 4 : 1];
#pragma unroll
      for (int i = 0; i < V / 4; ++i) words[i] = reinterpret_cast<const uint32_t*>(bytes)[i];
#pragma unroll
      for (int j = 0; j < V; ++j) bits |= unsigned((words[j / 4] >> (j % 4 * 8) & 0xff) != 0) << j;
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) bits |= unsigned(j < num && bytes[j] != 0) << j;
    }
    return bits;
  }
  unsigned bits = 0;
  unsigned bit = mask_bit(p.mask, r, position);
  for (int j = 0; j < num; ++j) {
    bits |= bit << j;
    if (++rest == p.width && j + 1 < num) {
      rest = 0;
      bit = mask_bit(p.mask, r, ++position);
    }
  }
  return bits;
}

template <typename T>
__global__ void __launch_bounds__(kMaskedThreads) masked_elements_kernel(const __grid_constant__ MaskedParams p) {
  constexpr int V = kVec<T>, ROWS = 4;
  const int64_t total = p.size * p.width;
  for (int64_t v = int64_t(blockIdx.x) * kMaskedThreads + threadIdx.x; v < p.num_vectors;
       v += int64_t(gridDim.x) * kMaskedThreads) {
    const int64_t first = v * V;
    const int num = int(min(int64_t(V), total - first));
    const int64_t position = p.width == 1 ? first : first / p.width;
    const int64_t rest = first - position * p.width;
    acc_t<T> acc[V] = {};
    int count[V] = {};
    for (int64_t r0 = 0; r0 < p.num_rows; r0 += ROWS) {
      Raw<T> raw[ROWS];
      unsigned bits[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const bool row = r0 + i < p.num_rows;
        bits[i] = row ? element_bits<V>(p, r0 + i, first, position, rest, num) : 0;
        raw[i] = load_any<T>(p.data + (r0 + i) * p.row_bytes + first * int64_t(sizeof(T)), 0, row ? num : 0);
      }
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const acc_t<T> value = bits[i] >> j & 1 ? element(raw[i], j) : acc_t<T>(0);
          acc[j] = add(acc[j], value);
          count[j] += bits[i] >> j & 1;
        }
      }
    }
    finish<acc_t<T>, V>(p.epilogue, first, num, acc, count);
  }
}

}  // namespace shardsum
