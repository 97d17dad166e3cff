// The ragged sum: one warp per tile, one launch for up to kMaxRows rows.
//
// A warp takes tiles of the flat output in a grid-wide cyclic order (neighbouring warps, neighbouring tiles; low
// columns, where most rows are valid, first). For a tile it
//   1. lists the rows that overlap it, in row order (ballots over the row table in shared memory);
//   2. walks the list in blocks of ROWS rows x COLS vectors a lane with ROWS * COLS = 8: all loads of a block are issued
//      before its first add, so a tile keeps 8 loads of 16 bytes a lane in flight however few rows are valid. A row that
//      ends inside the tile only switches lanes off: no slow path.
// The adds of one element are always in row order. Positions are counted in units: whole vectors where every address
// and boundary is a multiple of a vector (kAligned), else elements.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaxRows = 256;  // of one launch: the table travels in the kernel's parameters
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kBlocksPerSM = 4;
constexpr int kBatch = 8;  // loads in flight per lane
constexpr unsigned kFullWarp = 0xffffffffu;

// Row bounds in units; `origin` is where unit 0 would be (it may lie outside the row).
struct RowRange {
  const char* origin;
  int64_t begin, end;
};

struct RowsParams {
  Epilogue epilogue;
  int64_t num_units;
  int64_t num_tiles;
  int tile_cols;  // vectors a lane per tile
  int num_rows;
  DeviceRows device;  // used instead of `rows` when device.lengths is not null
  int64_t first_row;  // of `device`, for this launch
  int64_t size;
  int64_t units_per_position;
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

template <typename T>
__device__ inline RowRange device_row(const RowsParams& p, int64_t r, int unit_bytes) {
  const DeviceRows& d = p.device;
  const int64_t begin =
      d.starts == nullptr ? 0 : min(max(load_index(d.starts, r, d.index64), int64_t(0)), p.size);
  const int64_t length = min(max(load_index(d.lengths, r, d.index64), int64_t(0)), d.capacity);
  const char* data = static_cast<const char*>(d.data) + r * d.row_stride * int64_t(sizeof(T));
  const int64_t first = begin * p.units_per_position;
  return {data - first * unit_bytes, first, min(begin + length, p.size) * p.units_per_position};
}

// The rows that overlap the units [first, first + tile_len), in order, padded with empty ones to a multiple of kBatch.
__device__ inline int list_rows(const RowRange* rows, int num_rows, int64_t first, int tile_len, int unit_bytes,
                                Active* list) {
  const int lane = threadIdx.x % 32;
  int n = 0;
  for (int r0 = 0; r0 < num_rows; r0 += 32) {
    const int r = r0 + lane;
    int64_t lo = 0, hi = 0;
    if (r < num_rows) {
      lo = max(rows[r].begin - first, int64_t(0));
      hi = min(rows[r].end - first, int64_t(tile_len));
    }
    const bool overlaps = lo < hi;
    const unsigned mask = __ballot_sync(kFullWarp, overlaps);
    if (overlaps) {
      list[n + __popc(mask & ((1u << lane) - 1))] = {rows[r].origin + first * unit_bytes, int(lo), int(hi - lo)};
    }
    n += __popc(mask);
  }
  if (lane < kBatch) list[n + lane] = {nullptr, 0, 0};
  __syncwarp();
  return n;
}

// A block of the walk: ROWS rows x COLS vectors a lane, all loads before the first add. With several columns the list has
// at most ROWS rows; with one, blocks follow each other until it ends.
template <typename T, bool kAligned, int ROWS, int COLS>
__device__ inline void sum_tile(const RowsParams& p, const Active* list, int n, int64_t first, int tile_len) {
  constexpr int V = kVec<T>;
  constexpr int kStep = kAligned ? 1 : V;  // units per vector
  constexpr int kUnitBytes = int(sizeof(T)) * (kAligned ? V : 1);
  for (int col = 0; col < p.tile_cols; col += COLS) {
    const int off = (col * 32 + threadIdx.x % 32) * kStep;  // the lane's first vector; the next is 32 vectors further
    Raw<T> raw[ROWS][COLS];
    int hits[COLS] = {};
    const auto load_block = [&](int k) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) {
        const Active row = list[k + i];
#pragma unroll
        for (int c = 0; c < COLS; ++c) {
          const int at = off + c * 32 * kStep - row.lo;
          const char* address = row.tile + int64_t(off + c * 32 * kStep) * kUnitBytes;
          if constexpr (kAligned) {
            const bool valid = unsigned(at) < unsigned(row.len);
            raw[i][c] = load_streaming<T>(address, valid);
            hits[c] += valid;
          } else {
            raw[i][c] = load_any<T>(address, -at, row.len - at);
          }
        }
      }
    };
    load_block(0);
#pragma unroll
    for (int c = 0; c < COLS; ++c) {
      const int at = off + c * 32 * kStep;
      const int num = kAligned ? (at < tile_len ? V : 0) : min(max(tile_len - at, 0), V);
      const int64_t element = (first + at) * (V / kStep);
      acc_t<T> acc[V];
      begin_sum<acc_t<T>, V>(p.epilogue, element, num, acc);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][c]);
      if constexpr (COLS == 1) {
        for (int k = ROWS; k < n; k += ROWS) {
          load_block(k);
#pragma unroll
          for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i][0]);
        }
      }
      if (num == 0) continue;
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

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) sum_rows_kernel(const __grid_constant__ RowsParams p) {
  constexpr int kUnitBytes = int(sizeof(T)) * (kAligned ? kVec<T> : 1);
  extern __shared__ Active lists[];
  const int list_size = p.num_rows + kBatch;
  RowRange* rows = reinterpret_cast<RowRange*>(lists + kWarps * list_size);
  for (int r = threadIdx.x; r < p.num_rows; r += kThreads)
    rows[r] = p.device.lengths != nullptr ? device_row<T>(p, p.first_row + r, kUnitBytes) : p.rows[r];
  __syncthreads();

  const int warp = threadIdx.x / 32;
  Active* list = lists + warp * list_size;
  const int tile_units = p.tile_cols * 32 * (kAligned ? 1 : kVec<T>);
  for (int64_t tile = int64_t(blockIdx.x) * kWarps + warp; tile < p.num_tiles; tile += int64_t(gridDim.x) * kWarps) {
    const int64_t first = tile * tile_units;
    const int tile_len = int(min(int64_t(tile_units), p.num_units - first));
    const int n = list_rows(rows, p.num_rows, first, tile_len, kUnitBytes, list);
    constexpr int kLoads = kAligned ? kBatch : kBatch / 2;
    if (n > kLoads / 2) sum_tile<T, kAligned, kLoads, 1>(p, list, n, first, tile_len);
    else if (n > kLoads / 4) sum_tile<T, kAligned, kLoads / 2, 2>(p, list, n, first, tile_len);
    else sum_tile<T, kAligned, kLoads / 4, 4>(p, list, n, first, tile_len);
    __syncwarp();
  }
}

}  // namespace shardsum
