// The ragged sum of any lengths: a block per tile of the output, up to kMaxRows rows in one launch.
//
// A block first lists the rows that overlap its tile, in row order (one warp, ballots). The tile is then a sequence of
// items, (column 0, first row of the list), (column 0, second row), ..., (column 1, first row), ...: one vector a
// thread each. Every thread streams its items through its own ring in shared memory with asynchronous copies, always
// kDepth of them in flight however many rows are valid, and adds them as they arrive: in row order. A row that ends
// inside the tile only copies less, so there is no slow path.
//
// Positions are counted in units: whole vectors where every address and boundary is a multiple of one (kAligned), else
// elements. A launch covers at most kMaxUnits, so 32 bits do.
#pragma once
#include "arith.cuh"

namespace shardsum {

constexpr int kMaxRows = 256;  // of one launch: the table travels in the kernel's parameters
constexpr int64_t kMaxUnits = int64_t(1) << 30;
constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 10;  // as many as shared memory allows
constexpr int kDepth = 8;         // items in flight per thread
constexpr int kMaxCols = 3;       // vectors per thread and tile

// Bounds in units of the launch's slice of the output; `origin` is where unit 0 would be (it may lie outside the row).
struct alignas(16) RowRange {
  const char* origin;
  int begin, end;
};

struct RowsParams {
  Epilogue epilogue;
  int num_units;
  int tile_cols;     // vectors per thread and tile
  int narrow_tiles;  // so many at the front have one vector per thread
  int num_rows;
  int first_row;       // of `device`, for this launch
  int64_t first_unit;  // of the output, for this launch
  int64_t size, units_per_position;
  DeviceRows device;  // used instead of `rows` when device.lengths is not null
  RowRange rows[kMaxRows];
};

// A row of the current tile: it covers the units [lo, lo + len) of the tile.
struct alignas(16) Active {
  const char* tile;  // address of the tile's first unit
  int lo, len;
};

__device__ inline Active load_active(const Active* p) {  // in one piece
  const int4 v = *reinterpret_cast<const int4*>(p);
  return {reinterpret_cast<const char*>((uint64_t(unsigned(v.y)) << 32) | unsigned(v.x)), v.z, v.w};
}

// Row r of the host's table, another one for every lane. The constant cache serves one address at a time: from so many
// rows on a load through the L1 is faster.
__device__ inline RowRange load_row(const RowsParams& p, int r) {
  constexpr int kFewConstants = 8;
  if (p.num_rows <= kFewConstants) return p.rows[r];
  uint32_t low, high;
  int begin, end;
  asm("ld.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(low), "=r"(high), "=r"(begin), "=r"(end) : "l"(&p.rows[r]));
  return {reinterpret_cast<const char*>((uint64_t(high) << 32) | low), begin, end};
}

__device__ inline int64_t load_index(const void* p, int64_t i, bool index64) {
  return index64 ? static_cast<const int64_t*>(p)[i] : static_cast<const int32_t*>(p)[i];
}

// Row r of this launch, its bounds on the device.
template <typename T, int kUnitBytes>
__device__ inline RowRange load_device_row(const RowsParams& p, int r) {
  const DeviceRows& d = p.device;
  const int64_t row = p.first_row + r;
  const int64_t start = d.starts == nullptr ? 0 : min(max(load_index(d.starts, row, d.index64), int64_t(0)), p.size);
  const int64_t length = min(max(load_index(d.lengths, row, d.index64), int64_t(0)), d.capacity);
  const int64_t begin = start * p.units_per_position - p.first_unit;
  const int64_t end = min(start + length, p.size) * p.units_per_position - p.first_unit, last = p.num_units;
  return {static_cast<const char*>(d.data) + row * d.row_stride * int64_t(sizeof(T)) - begin * kUnitBytes,
          int(min(max(begin, int64_t(0)), last)), int(min(max(end, int64_t(0)), last))};
}

// The rows that overlap the units [first, first + tile_len), in order. One warp.
template <typename T, int kUnitBytes>
__device__ inline int list_rows(const RowsParams& p, int first, int tile_len, Active* list) {
  const int lane = threadIdx.x;
  int n = 0;
#pragma unroll 1
  for (int r0 = 0; r0 < p.num_rows; r0 += 32) {
    const int r = min(r0 + lane, p.num_rows - 1);
    const RowRange row = p.device.lengths == nullptr ? load_row(p, r) : load_device_row<T, kUnitBytes>(p, r);
    const int lo = max(row.begin - first, 0), hi = min(row.end - first, tile_len);
    const bool overlaps = lo < hi && r == r0 + lane;
    const unsigned mask = __ballot_sync(0xffffffffu, overlaps);
    if (overlaps) list[n + __popc(mask & ((1u << lane) - 1))] = {row.origin + int64_t(first) * kUnitBytes, lo, hi - lo};
    n += __popc(mask);
  }
  return n;
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM) sum_rows_kernel(const __grid_constant__ RowsParams p) {
  constexpr int V = kVec<T>;
  constexpr int kStep = kAligned ? 1 : V;  // units per vector
  constexpr int kUnitBytes = kVecBytes<T> / kStep;
  __shared__ Raw<T> rings[kDepth][kThreads];
  __shared__ Active list[kMaxRows];
  __shared__ int list_length;
  const int tile = blockIdx.x;
  const int cols = tile < p.narrow_tiles ? 1 : p.tile_cols, tile_units = cols * kThreads * kStep;
  const int first = (tile < p.narrow_tiles ? tile : p.narrow_tiles + (tile - p.narrow_tiles) * cols) * kThreads * kStep;
  const int tile_len = min(tile_units, p.num_units - first);
  if (threadIdx.x < 32) {
    const int n = list_rows<T, kUnitBytes>(p, first, tile_len, list);
    if (threadIdx.x == 0) list_length = n;
  }
  __syncthreads();
  const int n = list_length;

  // The next item to copy: row `next` of the list, this thread's vector at unit `copy_at` of the tile.
  int next = 0, copy_at = threadIdx.x * kStep, left = n * cols;
  const auto copy_item = [&](int slot) {
    const Active row = load_active(&list[next]);
    const int at = copy_at - row.lo;
    const char* from = row.tile + int64_t(copy_at) * kUnitBytes;
    if constexpr (kAligned)
      copy_async(&rings[slot][threadIdx.x], from, unsigned(at) < unsigned(row.len));
    else
      copy_any(&rings[slot][threadIdx.x], from, -at, row.len - at);
    copy_commit();
    if (++next == n) next = 0, copy_at += kThreads * kStep;
    --left;
  };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot)
    if (left > 0) copy_item(slot);

  int slot = 0;
  for (int at = threadIdx.x * kStep; at < tile_units; at += kThreads * kStep) {
    const int num = kAligned ? (at < tile_len ? V : 0) : min(max(tile_len - at, 0), V);
    const int64_t element = int64_t(first + at) * (V / kStep);
    acc_t<T> acc[V] = {};
    begin_sum<acc_t<T>, V>(p.epilogue, element, num, acc);
    for (int k = 0; k < n; ++k) {
      if (left > 0) {
        copy_wait<kDepth - 1>();
        add_vector<T>(acc, rings[slot][threadIdx.x]);
        copy_item(slot);
      } else {
        copy_wait<0>();
        add_vector<T>(acc, rings[slot][threadIdx.x]);
      }
      if (++slot == kDepth) slot = 0;
    }
    if (num == 0) continue;
    if constexpr (kAligned) {
      if (p.epilogue.direct) {
        store_vector(static_cast<T*>(p.epilogue.out) + element, acc);
        continue;
      }
    }
    int count[V] = {};
    if (p.epilogue.mean) {
      for (int k = 0; k < n; ++k) {
        const int in_row = at - list[k].lo;
#pragma unroll
        for (int j = 0; j < V; ++j) count[j] += unsigned(in_row + (kAligned ? 0 : j)) < unsigned(list[k].len);
      }
    }
    finish<acc_t<T>, V>(p.epilogue, element, num, acc, count);
  }
}

}  // namespace shardsum
