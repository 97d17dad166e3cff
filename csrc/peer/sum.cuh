// What a warp does with one stretch of the output: sum the rows over it, or move their bytes.
#pragma once
#include "finish.cuh"

namespace shardsum {

constexpr int kPeerBatch = 8;  // loads in flight per lane

// Elements [lo, hi) of the flat range that the same rows cover, as far as a warp has looked. count: of the rows, or -1
// if some row begins or ends inside.
struct alignas(16) Segment {
  int64_t lo, hi;
  const char *a, *b;  // origins of the first two rows
  int count;
  bool near;  // all are read where this process's caller put them
};

// A row that overlaps the current stretch: its elements [lo, hi), counted from the stretch's first element.
struct alignas(16) ActiveRow {
  const char* first;
  int lo, hi;
};

// A warp's own shared memory.
struct WarpSpace {
  Segment segment;    // where the warp was last
  ActiveRow list[1];  // room for all rows and a batch
};
__host__ __device__ inline int warp_space_bytes(int num_ranks) {
  return int(sizeof(Segment)) + (num_ranks + kPeerBatch) * int(sizeof(ActiveRow));
}

__device__ inline int64_t warp_max(int64_t v) {
#pragma unroll
  for (int k = 16; k > 0; k /= 2) v = max(v, int64_t(__shfl_xor_sync(kFullWarp, v, k)));
  return v;
}

// Sets `segment` to the one around [lo, hi).
__device__ __forceinline__ void find_segment(const Shared& s, int num_rows, int64_t lo, int64_t hi, Segment& segment) {
  Segment x{0, 0, nullptr, nullptr, 0, true};
  int64_t begin = 0, end = INT64_MAX;
  bool far = false, cut = false;
#pragma unroll 1
  for (int r0 = 0; r0 < num_rows; r0 += 32) {
    const int r = r0 + lane_index();
    const Range row = r < num_rows ? s.rows[r].range : Range{0, 0};
    const bool held = row.begin < row.end, overlaps = held && row.begin < hi && row.end > lo;
    if (overlaps) {
      cut |= row.begin > lo || row.end < hi;
      far |= !s.rows[r].near;
      begin = max(begin, row.begin), end = min(end, row.end);
    } else if (held) {
      if (row.end <= lo) begin = max(begin, row.end);
      if (row.begin >= hi) end = min(end, row.begin);
    }
    unsigned rows = __ballot_sync(kFullWarp, overlaps);
#pragma unroll 1
    for (; rows != 0; rows &= rows - 1, ++x.count) {
      if (x.count == 0) x.a = s.rows[r0 + __ffs(rows) - 1].origin;
      if (x.count == 1) x.b = s.rows[r0 + __ffs(rows) - 1].origin;
    }
  }
  x.near = !__any_sync(kFullWarp, far);
  cut = __any_sync(kFullWarp, cut);
  x.lo = cut ? lo : warp_max(begin);
  x.hi = cut ? hi : -warp_max(-end);
  if (cut) x.count = -1;
  if (lane_index() == 0) segment = x;
  __syncwarp();
}

// The rows that overlap [lo, hi) of the stretch that starts at `first`, in rank order, then empty ones to a full batch.
// `shift`: how many bytes the stretch lies off the origins of rows that are not near.
__device__ __forceinline__ int list_active(const Shared& s, int num_rows, int64_t first, int lo, int hi, int64_t bytes,
                                           ActiveRow* list, int64_t shift = 0) {
  const int lane = lane_index();
  int n = 0;
#pragma unroll 1
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
      const char* origin = s.rows[r].origin + (s.rows[r].near ? 0 : shift);
      list[at] = {origin + first * bytes, int(range.begin - first), int(range.end - first)};
    }
    n += __popc(mask);
  }
  if (lane < kPeerBatch) list[n + lane] = {nullptr, 0, 0};
  __syncwarp();
  return n;
}

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

// Where the sums of those elements of the vector at `at` that lie in [lo, hi) start. `from`: where that of element 0
// is.
template <typename A, int V>
__device__ __forceinline__ void load_start(const A* from, int at, int lo, int hi, A (&acc)[V]) {
  constexpr int kPiece = 16 / int(sizeof(A));
  from += at;
  if (at >= lo && at + V <= hi && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int j = 0; j < V; j += kPiece) {
      const uint4 bits = load_private(reinterpret_cast<const char*>(from + j));
      memcpy(&acc[j], &bits, 16);
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (lo <= at + j && at + j < hi) acc[j] = from[j];
}

// Sums [lo, hi) of a stretch, one vector a lane at a time; the adds of one element are in rank order. kFold: they go on
// from e.start, where element 0 of the stretch has its accumulator.
template <typename T, int ROWS, bool kFold = false>
__device__ __forceinline__ void sum_any(const Epilogue& e, const ActiveRow* list, int n, int columns, int lo, int hi) {
  constexpr int V = kVec<T>;
#pragma unroll 1
  for (int at = lane_index() * V; at < columns * 32 * V; at += 32 * V) {
    acc_t<T> acc[V];
#pragma unroll
    for (int j = 0; j < V; ++j) acc[j] = 0;
    if constexpr (kFold) load_start<acc_t<T>, V>(static_cast<const acc_t<T>*>(e.start), at, lo, hi, acc);
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

// The same where none, one or two rows cover a whole stretch of an aligned output, and nothing but rounding comes after
// the sum: all loads of the stretch are issued before the first add. a and b: the rows' first element of the stretch.
template <typename T, typename Out, int kColumns>
__device__ __forceinline__ void sum_two(Out* out, const char* a, const char* b, int n) {
  constexpr int V = kVec<T>, kStep = 32 * kVecBytes<T>;
  a += lane_index() * kVecBytes<T>;
  b += lane_index() * kVecBytes<T>;
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

// A whole stretch that no row reaches.
__device__ inline void store_zeros(char* out, int num_bytes) {
#pragma unroll 4
  for (int at = lane_index() * 16; at < num_bytes; at += 32 * 16)
    __stcs(reinterpret_cast<uint4*>(out + at), uint4{0, 0, 0, 0});
}

// What a warp does next: elements [lo, hi) of the stretch from element `first` on.
struct Work {
  int64_t first;
  int lo, hi;
};

// kFold: `before` is the place of the range's element 0 among the call's accumulators.
template <typename T, typename Out, DType kOut, bool kFold>
__device__ __forceinline__ void sum_stretch(const PeerCall& c, const Shared& s, WarpSpace& space, const Work& w,
                                            void* out, int64_t before) {
  constexpr int kRows = std::is_floating_point_v<acc_t<T>> ? kPeerBatch : kPeerBatch / 2;
  const Segment& x = space.segment;
  Epilogue e{};
  e.out = out;
  e.out_dtype = kOut;
  const bool whole = w.lo == 0 && w.hi == c.stretch_elements && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  if constexpr (kFold) {
    e.start = static_cast<const acc_t<T>*>(c.accumulators) + before + w.first;
    e.carried = c.carried;
  }
  if (!kFold && whole && x.count == 0 && !c.has_scale)
    return store_zeros(static_cast<char*>(out), w.hi * int(sizeof(Out)));
  if constexpr (std::is_floating_point_v<acc_t<T>>) {
    e.mean = c.mean;
    e.has_scale = c.has_scale;
    e.scale = c.scale;
    e.plain = !c.mean && !c.has_scale;
    if (!kFold && whole && e.plain && (x.count == 1 || x.count == 2)) {
      Out* to = static_cast<Out*>(out);
      const char *a = x.a + w.first * int(sizeof(T)), *b = x.b + w.first * int(sizeof(T));
      if (c.warp_columns == 8) return sum_two<T, Out, 8>(to, a, b, x.count);
      if (c.warp_columns == 4) return sum_two<T, Out, 4>(to, a, b, x.count);
      if (c.warp_columns == 2) return sum_two<T, Out, 2>(to, a, b, x.count);
      if (c.warp_columns == 1) return sum_two<T, Out, 1>(to, a, b, x.count);
    }
  }
  const int n = list_active(s, c.num_ranks, w.first, w.lo, w.hi, c.in_bytes, space.list);
  sum_any<T, kRows, kFold>(e, space.list, n, c.warp_columns, w.lo, w.hi);
}

__device__ __forceinline__ void move_stretch(const PeerCall& c, const Shared& s, ActiveRow* list, const Work& w,
                                             char* out) {
  const int n = list_active(s, c.num_ranks, w.first, w.lo, w.hi, c.in_bytes, list);
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const ActiveRow& row = list[i];
    copy_bytes<true>(out - w.first, row.first - w.first, w.first + row.lo, w.first + row.hi, {0, 1});
  }
}

// Sums or moves a stretch of the warp's segment; `out` is where its element `first` would go. `before`: sum_stretch.
template <bool kFold = false>
__device__ __forceinline__ void run_stretch(const PeerCall& c, const Shared& s, WarpSpace& space, const Work& w,
                                            char* out, int64_t before = 0) {
  switch (c.kind) {
#define SHARDSUM_SUM(index, T, Out, in, out_dtype)                             \
  case index:                                                                  \
    sum_stretch<T, Out, DType::out_dtype, kFold>(c, s, space, w, out, before); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_SUM)
#undef SHARDSUM_SUM
    default:
      if constexpr (!kFold) move_stretch(c, s, space.list, w, out);
  }
  __syncwarp();
}

}  // namespace shardsum
