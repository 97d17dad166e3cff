// What a warp does with one stretch of the output: sum the rows over it, or move their bytes.
#pragma once
#include "peer_finish.cuh"

namespace shardsum {

constexpr int kPeerBatch = 8;  // loads in flight per lane

// A row that overlaps the current stretch: its elements [lo, hi), counted from the stretch's first element.
struct alignas(16) ActiveRow {
  const char* first;
  int lo, hi;
};

// The rows that overlap [lo, hi) of the stretch that starts at `first`, in rank order, then empty ones to a full batch.
__device__ inline int list_active(const Shared& s, int num_rows, int64_t first, int lo, int hi, int64_t bytes,
                                  ActiveRow* list) {
  const int lane = lane_index();
  int n = 0;
  for (int r0 = 0; r0 < num_rows; r0 += 32) {
    const int r = r0 + lane;
    Range range{0, 0};
    if (r < num_rows) range = clip(s.rows[r].range, first + lo, first + hi);
    const bool overlaps = range.begin < range.end;
    const unsigned mask = __ballot_sync(kFullWarp, overlaps);
    if (overlaps) {
#if SHARDSUM_PEER_MUTANT == 4  // stress test only: ranks in reverse
      const int at = n + __popc(mask >> lane >> 1);
#else
      const int at = n + __popc(mask & ((1u << lane) - 1));
#endif
      list[at] = {s.rows[r].origin + first * bytes, int(range.begin - first), int(range.end - first)};
    }
    n += __popc(mask);
  }
  if (lane < kPeerBatch) list[n + lane] = {nullptr, 0, 0};
  __syncwarp();
  return n;
}

__device__ inline bool covers(const ActiveRow& row, int count) { return row.lo == 0 && row.hi == count; }

template <typename T>
__device__ inline Raw<T> load_raw(const char* p) {
  Raw<T> r;
  if constexpr (kVecBytes<T> == 16) {
    const uint4 v = load_peer(p);
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p) : "memory");
  }
  return r;
}

// Zeros where the row does not reach.
template <typename T>
__device__ inline Raw<T> load_vector(const ActiveRow& row, int at) {
  if (at + kVec<T> <= row.lo || at >= row.hi) return Raw<T>{};
  return load_raw<T>(row.first + int64_t(at) * int(sizeof(T)));
}

// Sums [lo, hi) of a stretch, one vector a lane at a time; the adds of one element are in rank order.
template <typename T, int ROWS>
__device__ __forceinline__ void sum_any(const Epilogue& e, const ActiveRow* list, int n, int columns, int lo, int hi) {
  constexpr int V = kVec<T>;
#pragma unroll 1
  for (int at = lane_index() * V; at < columns * 32 * V; at += 32 * V) {
    acc_t<T> acc[V];
#pragma unroll
    for (int j = 0; j < V; ++j) acc[j] = 0;
#pragma unroll 1
    for (int k = 0; k < n; k += ROWS) {
      Raw<T> raw[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; ++i) raw[i] = load_vector<T>(list[k + i], at);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) add_vector<T>(acc, raw[i]);
    }
    if (at >= hi || at + V <= lo) continue;
    int count[V] = {};
    if (e.mean) {
#pragma unroll 1
      for (int i = 0; i < n; ++i) count_vector<V>(count, at, list[i].lo, list[i].hi);
    }
    finish_part<acc_t<T>, V>(e, at, lo, hi, acc, count);
  }
}

// The same where one or two rows cover a whole stretch of an aligned output, and nothing but rounding comes after the
// sum: all loads of the stretch are issued before the first add.
template <typename T, typename Out, int kColumns>
__device__ __forceinline__ void sum_two(Out* out, const ActiveRow* list, int n) {
  constexpr int V = kVec<T>, kStep = 32 * kVecBytes<T>;
  const char* a = list[0].first + lane_index() * kVecBytes<T>;
  const char* b = list[1].first + lane_index() * kVecBytes<T>;
  Raw<T> raw[2][kColumns] = {};
#pragma unroll
  for (int c = 0; c < kColumns; ++c) raw[0][c] = load_raw<T>(a + c * kStep);
  if (n == 2) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) raw[1][c] = load_raw<T>(b + c * kStep);
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    acc_t<T> acc[V];
#pragma unroll
    for (int j = 0; j < V; ++j) acc[j] = 0;
    add_vector<T>(acc, raw[0][c]);
    add_vector<T>(acc, raw[1][c]);
    store_vector(out + (lane_index() + c * 32) * V, acc);
  }
}

template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_stretch(const PeerCall& c, const ActiveRow* list, int n, int lo, int hi,
                                            void* out) {
  Epilogue e{};
  e.out = out;
  e.out_dtype = kOut;
  if constexpr (std::is_floating_point_v<acc_t<T>>) {
    e.mean = c.mean;
    e.has_scale = c.has_scale;
    e.scale = c.scale;
    e.plain = !c.mean && !c.has_scale;
    Out* to = static_cast<Out*>(out);
    if ((n == 1 || n == 2) && e.plain && reinterpret_cast<uintptr_t>(out) % 16 == 0 && lo == 0 &&
        hi == c.stretch_elements && covers(list[0], hi) && (n == 1 || covers(list[1], hi))) {
      if (c.warp_columns == 8) return sum_two<T, Out, 8>(to, list, n);
      if (c.warp_columns == 4) return sum_two<T, Out, 4>(to, list, n);
      if (c.warp_columns == 2) return sum_two<T, Out, 2>(to, list, n);
      if (c.warp_columns == 1) return sum_two<T, Out, 1>(to, list, n);
    }
    sum_any<T, kPeerBatch>(e, list, n, c.warp_columns, lo, hi);
  } else {
    sum_any<T, kPeerBatch / 2>(e, list, n, c.warp_columns, lo, hi);
  }
}

__device__ inline void move_stretch(const ActiveRow* list, int n, int64_t first, char* out) {
#pragma unroll 1
  for (int i = 0; i < n; ++i)
    copy_bytes<true>(out - first, list[i].first - first, first + list[i].lo, first + list[i].hi, {0, 1});
}

// Elements [first + lo, first + hi) of the output; `out` is where element `first` would go.
__device__ __forceinline__ void run_stretch(const PeerCall& c, const Shared& s, ActiveRow* list, int64_t first, int lo,
                                            int hi, char* out) {
  const int n = list_active(s, c.num_ranks, first, lo, hi, c.in_bytes, list);
  switch (c.kind) {
#define SHARDSUM_SUM(index, T, Out, in, out_dtype)                  \
  case index:                                                       \
    sum_stretch<T, Out, DType::out_dtype>(c, list, n, lo, hi, out); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_SUM)
#undef SHARDSUM_SUM
    default:
      move_stretch(list, n, first, out);
  }
  __syncwarp();
}

}  // namespace shardsum
