// The ragged sum of any lengths: a block per tile of the output, up to kMaxRows rows in one launch.
//
// A block first lists the rows that overlap its tile, in row order (one warp, ballots). Then every thread walks the list
// in pieces of ROWS rows x COLS columns with ROWS * COLS = kBatch, all loads of a piece before its first add: the fewer
// rows are valid, the more columns are in flight. A row that ends inside the tile only switches threads off, and lone
// blocks on a busy multiprocessor hide each other's lists, so there is no slow path and no set-up to amortise.
//
// The adds of one element are always in row order. Positions are counted in units: whole vectors where every address
// and boundary is a multiple of one (kAligned), else elements. A launch covers at most kMaxUnits, so 32 bits do.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaxRows = 256;  // of one launch: the table travels in the kernel's parameters
constexpr int64_t kMaxUnits = int64_t(1) << 30;
constexpr int kThreads = 256;
constexpr int kBlocksPerSM = 4;
constexpr int kBatch = 8;    // loads in flight per thread
constexpr int kMaxCols = 4;  // vectors per thread and tile

// Bounds in units of the launch's slice of the output; `origin` is where unit 0 would be (it may lie outside the row).
struct RowRange {
  const char* origin;
  int begin, end;
};

struct RowsParams {
  Epilogue epilogue;
  int num_units;
  int tile_cols;  // vectors per thread and tile
  int num_rows;
  int first_row;        // of `device`, for this launch
  int64_t first_unit;   // of the output, for this launch
  int64_t size, units_per_position;
  DeviceRows device;  // used instead of `rows` when device.lengths is not null
  RowRange rows[kMaxRows];
};

// A row of the current tile: it covers the units [lo, lo + len) of the tile.
struct alignas(16) Active {
  const char* tile;  // address of the tile's first unit
  int lo, len;
};

__device__ inline int64_t load_index(const void* p, int64_t i, bool index64) {
  return index64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

template <typename T, int kUnitBytes>
__device__ inline RowRange device_row(const RowsParams& p, int64_t r) {
  const DeviceRows& d = p.device;
  const int64_t start = d.starts == nullptr ? 0 : min(max(load_index(d.starts, r, d.index64), int64_t(0)), p.size);
  const int64_t length = min(max(load_index(d.lengths, r, d.index64), int64_t(0)), d.capacity);
  const char* data = static_cast<const char*>(d.data) + r * d.row_stride * int64_t(sizeof(T));
  const int64_t begin = start * p.units_per_position - p.first_unit;
  const int64_t end = min(start + length, p.size) * p.units_per_position - p.first_unit;
  const int64_t last = p.num_units;
  return {data - begin * kUnitBytes, int(min(max(begin, int64_t(0)), last)), int(min(max(end, int64_t(0)), last))};
}

// The rows that overlap the units [first, first + tile_len), in order, padded with kBatch empty ones. One warp.
template <typename T, int kUnitBytes>
__device__ inline int list_rows(const RowsParams& p, int first, int tile_len, Active* list) {
  const int lane = threadIdx.x;
  int n = 0;
#pragma unroll 1
  for (int r0 = 0; r0 < p.num_rows; r0 += 32) {
    const int r = r0 + lane;
    RowRange row{};
    if (r < p.num_rows)
      row = p.device.lengths != nullptr ? device_row<T, kUnitBytes>(p, p.first_row + r) : p.rows[r];
    const int lo = max(row.begin - first, 0), hi = min(row.end - first, tile_len);
    const unsigned mask = __ballot_sync(0xffffffffu, lo < hi);
    if (lo < hi) list[n + __popc(mask & ((1u << lane) - 1))] = {row.origin + int64_t(first) * kUnitBytes, lo, hi - lo};
    n += __popc(mask);
  }
  if (lane < kBatch) list[n + lane] = {nullptr, 0, 0};
  return n;
}

// The walk of a list of n rows. With several columns n is at most ROWS; with one, pieces follow each other.
template <typename T, bool kAligned, bool kPlain, int ROWS, int COLS>
__device__ inline void sum_tile(const RowsParams& p, const Active* list, int n, int first, int tile_len) {
  constexpr int V = kVec<T>;
  constexpr int kStep = kAligned ? 1 : V;  // units per vector
  constexpr int kUnitBytes = kVecBytes<T> / kStep;
  for (int col = 0; col < p.tile_cols; col += COLS) {
    const int off = (col * kThreads + threadIdx.x) * kStep;  // this thread's first vector; the next is kThreads further
    Raw<T> raw[ROWS > 0 ? ROWS : 1][COLS];
    int hits[COLS] = {};
    const auto load_piece = [&](int k) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const Active row = list[k + i];
        const char* address = row.tile + int64_t(off) * kUnitBytes;
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const int at = off + c * kThreads * kStep - row.lo;
          if constexpr (kAligned) {
            const bool valid = unsigned(at) < unsigned(row.len);
            raw[i][c] = load_streaming<T>(address + c * kThreads * kVecBytes<T>, valid);
            if (!kPlain) hits[c] += valid;
          } else {
            raw[i][c] = load_any<T>(address + c * kThreads * kVecBytes<T>, -at, row.len - at);
          }
        }
      }
    };
    load_piece(0);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const int at = off + c * kThreads * kStep;
      const int num = kAligned ? (at < tile_len ? V : 0) : min(max(tile_len - at, 0), V);
      const int64_t element = int64_t(first + at) * (V / kStep);
      acc_t<T> acc[V] = {};
      if (!kPlain) begin_sum<acc_t<T>, V>(p.epilogue, element, num, acc);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][c]);
      if constexpr (COLS == 1) {
        for (int k = ROWS; k < n; k += ROWS) {
          load_piece(k);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][0]);
        }
      }
      if (num == 0) continue;
      if constexpr (kPlain) {
        store_vector<T>(static_cast<T*>(p.epilogue.out) + element, acc);
      } else {
        int count[V];
#pragma unroll
        for (int j = 0; j < V; ++j) count[j] = hits[c];
        if (!kAligned && p.epilogue.mean) {
          for (int i = 0; i < n; ++i) {
#pragma unroll
            for (int j = 0; j < V; ++j) count[j] += unsigned(at + j - list[i].lo) < unsigned(list[i].len);
          }
        }
        finish<acc_t<T>, V>(p.epilogue, element, num, acc, count);
      }
    }
  }
}

// kPlain: whole vectors, out in the rows' dtype, nothing but the sum.
template <typename T, bool kAligned, bool kPlain>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) sum_rows_kernel(const __grid_constant__ RowsParams p) {
  __shared__ Active list[kMaxRows + kBatch];
  __shared__ int list_length;
  const int tile_units = p.tile_cols * kThreads * (kAligned ? 1 : kVec<T>);
  const int first = blockIdx.x * tile_units;
  const int tile_len = min(tile_units, p.num_units - first);
  if (threadIdx.x < 32) {
    const int n = list_rows<T, int(sizeof(T)) * (kAligned ? kVec<T> : 1)>(p, first, tile_len, list);
    if (threadIdx.x == 0) list_length = n;
  }
  __syncthreads();
  const int n = list_length;
  constexpr int kLoads = kAligned ? kBatch : kBatch / 2;
  if (n > kLoads / 2) sum_tile<T, kAligned, kPlain, kLoads, 1>(p, list, n, first, tile_len);
  else if (n > kLoads / 4) sum_tile<T, kAligned, kPlain, kLoads / 2, 2>(p, list, n, first, tile_len);
  else if (n == 2 && kLoads == 8) sum_tile<T, kAligned, kPlain, 2, 4>(p, list, n, first, tile_len);
  else if (n == 1) sum_tile<T, kAligned, kPlain, 1, kMaxCols>(p, list, n, first, tile_len);
  else sum_tile<T, kAligned, kPlain, 0, 1>(p, list, n, first, tile_len);
}

}  // namespace shardsum
