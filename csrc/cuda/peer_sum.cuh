// What a warp does with one stretch of the output: sum the rows over it, or move their bytes.
#pragma once
#include "peer_rows.cuh"

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

template <typename T>
__device__ inline Raw<T> load_vector(const ActiveRow& row, int at) {
  constexpr int V = kVec<T>;
  Raw<T> r{};
  if (at + V <= row.lo || at >= row.hi) return r;
  const char* p = row.first + int64_t(at) * int(sizeof(T));
  if constexpr (kVecBytes<T> == 16) {
    const uint4 v = load_peer(p);
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else {
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(r.w[0]), "=r"(r.w[1]) : "l"(p) : "memory");
  }
  return r;
}

// Divides, scales, rounds and stores the elements [lo, hi) of the stretch that the vector at `at` holds; e.out is where
// the stretch's first element goes, which lies before the output where the output begins inside the stretch.
template <typename T>
__device__ __forceinline__ void finish_vector(const Epilogue& e, const ActiveRow* list, int n, int at, int lo, int hi,
                                              acc_t<T> (&acc)[kVec<T>]) {
  constexpr int V = kVec<T>;
  int count[V];
#pragma unroll
  for (int j = 0; j < V; ++j) count[j] = 0;
  if (e.mean) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
#pragma unroll
      for (int j = 0; j < V; ++j) count[j] += at + j >= list[i].lo && at + j < list[i].hi;
    }
  }
  const int begin = max(at, lo), end = min(at + V, hi);
#pragma unroll 1
  for (int skip = begin - at; skip > 0; --skip) {  // an output that begins inside the vector
#pragma unroll
    for (int j = 0; j + 1 < V; ++j) acc[j] = acc[j + 1], count[j] = count[j + 1];
  }
  finish<acc_t<T>, V>(e, begin, end - begin, acc, count);
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
    if (at < hi && at + V > lo) finish_vector<T>(e, list, n, at, lo, hi, acc);
  }
}

// The same for at most two rows, a whole stretch of an aligned output, and nothing but rounding after the sum: as many
// bytes in flight as with eight rows.
template <typename T, typename Out>
__device__ __forceinline__ void sum_two(const Epilogue& e, const ActiveRow* list, int columns) {
  constexpr int V = kVec<T>, kColumns = kPeerBatch / 2;
  const ActiveRow a = list[0], b = list[1];
#pragma unroll 1
  for (int at = lane_index() * V; at < columns * 32 * V; at += kColumns * 32 * V) {
    Raw<T> raw[2][kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      raw[0][c] = load_vector<T>(a, at + c * 32 * V);
      raw[1][c] = load_vector<T>(b, at + c * 32 * V);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      acc_t<T> acc[V];
#pragma unroll
      for (int j = 0; j < V; ++j) acc[j] = 0;
      add_vector<T>(acc, raw[0][c]);
      add_vector<T>(acc, raw[1][c]);
      Epilogue here = e;
      here.out = static_cast<Out*>(e.out) + at + c * 32 * V;
      __builtin_assume(reinterpret_cast<uintptr_t>(here.out) % 16 == 0);
      store<Out>(here, 0, V, acc);
    }
  }
}

template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_stretch(const Shared& s, const ActiveRow* list, int n, int columns, int lo, int hi,
                                            void* out) {
  Epilogue e{};
  e.out = out;
  e.out_dtype = kOut;
  if constexpr (std::is_floating_point_v<acc_t<T>>) {
    e.mean = s.mean;
    e.has_scale = s.has_scale;
    e.scale = s.scale;
    const bool whole = lo == 0 && hi == columns * 32 * kVec<T> && reinterpret_cast<uintptr_t>(out) % 16 == 0;
    if (n <= 2 && columns % 4 == 0 && whole && !e.mean && !e.has_scale)
      sum_two<T, Out>(e, list, columns);
    else
      sum_any<T, kPeerBatch>(e, list, n, columns, lo, hi);
  } else {
    sum_any<T, kPeerBatch / 2>(e, list, n, columns, lo, hi);
  }
}

__device__ inline void move_stretch(const ActiveRow* list, int n, int64_t first, char* out) {
  for (int i = 0; i < n; ++i)
    copy_bytes<true>(out - first, list[i].first - first, first + list[i].lo, first + list[i].hi, {0, 1});
}

__device__ __host__ constexpr int pair_of(DType in, DType out) { return int(in) * 16 + int(out); }

// Elements [first + lo, first + hi) of the output; `out` is where element `first` would go.
__device__ __forceinline__ void run_stretch(const PeerCall& c, const Shared& s, ActiveRow* list, int64_t first, int lo,
                                            int hi, int64_t bytes, char* out) {
  using D = DType;
  const int n = list_active(s, c.num_ranks, first, lo, hi, bytes, list);
  if (c.move) {
    move_stretch(list, n, first, out);
  } else {
#define SHARDSUM_CASE(T, in, Out, out_dtype)                                    \
  case pair_of(D::in, D::out_dtype):                                            \
    sum_stretch<T, Out, D::out_dtype>(s, list, n, c.warp_columns, lo, hi, out); \
    break;
    switch (pair_of(c.in_dtype, c.out_dtype)) {
      SHARDSUM_CASE(__nv_bfloat16, kBFloat16, __nv_bfloat16, kBFloat16)
      SHARDSUM_CASE(__nv_bfloat16, kBFloat16, float, kFloat32)
      SHARDSUM_CASE(__nv_bfloat16, kBFloat16, __half, kFloat16)
      SHARDSUM_CASE(__half, kFloat16, __half, kFloat16)
      SHARDSUM_CASE(__half, kFloat16, float, kFloat32)
      SHARDSUM_CASE(__half, kFloat16, __nv_bfloat16, kBFloat16)
      SHARDSUM_CASE(float, kFloat32, float, kFloat32)
      SHARDSUM_CASE(float, kFloat32, __nv_bfloat16, kBFloat16)
      SHARDSUM_CASE(float, kFloat32, __half, kFloat16)
      SHARDSUM_CASE(double, kFloat64, double, kFloat64)
      SHARDSUM_CASE(double, kFloat64, float, kFloat32)
      SHARDSUM_CASE(uint8_t, kUInt8, int64_t, kInt64)
      SHARDSUM_CASE(int8_t, kInt8, int64_t, kInt64)
      SHARDSUM_CASE(int16_t, kInt16, int64_t, kInt64)
      SHARDSUM_CASE(int32_t, kInt32, int64_t, kInt64)
      SHARDSUM_CASE(int64_t, kInt64, int64_t, kInt64)
      SHARDSUM_CASE(Bool, kBool, int64_t, kInt64)
      default:
        break;
    }
#undef SHARDSUM_CASE
  }
  __syncwarp();
}

}  // namespace shardsum
