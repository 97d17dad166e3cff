// A large sum of floats in one launch: some warps of a block push this process's rows into the peers' inboxes from the
// first moment on, the others sum what arrives (words.cuh), both over the same stretches of the flat range. No warp
// fences inside the stream of data, and no warp waits for another of its own process.
#include <cuda_runtime.h>

#include "words.cuh"

namespace shardsum {
namespace {

constexpr int kStreamThreads = 256;
constexpr int kServiceWarp = kStreamThreads / 32 - 1;  // bounds, then what settles the launch
constexpr int kColumns = kStretchBytes / (32 * 16);    // vectors a lane in a stretch
constexpr int kGroupsInStretch = kColumns / kWords<true>;

// The stretches that some elements of the chunk lie in, dealt to the blocks, then to the warps that share the work.
struct Deal {
  int next, end, step;
  __device__ __forceinline__ Deal(const PeerCall& c, Range range, Worker worker) {
    next = int((range.begin - c.chunk_begin) * c.in_bytes / kStretchBytes) + worker.index * gridDim.x + blockIdx.x;
    end = range.begin < range.end ? int(((range.end - c.chunk_begin) * c.in_bytes + kStretchBytes - 1) / kStretchBytes)
                                  : next;
    step = gridDim.x * worker.count;
  }
};

// Whether a stretch is neither sent nor awaited, of no row.
__device__ __forceinline__ bool is_skipped(const PeerCall& c, Gap gap, int stretch) {
  const int elements = kStretchBytes / c.in_bytes;
  const int64_t begin = c.chunk_begin + int64_t(stretch) * elements;
  return is_inside(c, gap, begin, begin + elements);
}

__device__ __forceinline__ Range hull(Range a, Range b) {
  if (a.begin >= a.end) return b;
  if (b.begin >= b.end) return a;
  return {min(a.begin, b.begin), max(a.end, b.end)};
}

// Source i's part of a stretch that lies inside it, whole aligned vectors.
__device__ __forceinline__ void push_whole(const PeerCall& c, int parity, int i, const char* from, int stretch) {
  uint4 words[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) words[j] = load_private(from + j * 512);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) words[j] = word_of(words[j]);
#pragma unroll 1
  for (int k = 0; k + 1 < c.num_processes; ++k) {
    char* to =
        inbox(c, peer_of(c, k), parity, c.sources[i].rank) + word_offset<true>(int64_t(stretch) * kGroupsInStretch);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) store_word(to + j * 512, words[j]);
  }
}

// Source i's part of a stretch goes to all peers, as far as it lies in `range`.
__device__ __forceinline__ void push_stretch(const PeerCall& c, int parity, int i, Range range, int stretch) {
  const HeldRow& h = c.held[i];
  const int64_t lo = range.begin * c.in_bytes, hi = range.end * c.in_bytes;
  const int64_t begin = c.chunk_begin * c.in_bytes + int64_t(stretch) * kStretchBytes;
  if (begin >= hi || begin + kStretchBytes <= lo) return;
#if SHARDSUM_PEER_MUTANT != 2
  if (reinterpret_cast<uint64_t>(h.origin) % 16 == 0 && begin >= lo && begin + kStretchBytes <= hi)
    return push_whole(c, parity, i, h.origin + begin + lane_index() * 16, stretch);
#endif
#pragma unroll 1
  for (int k = 0; k < kGroupsInStretch; ++k)
    push_group<true>(c, parity, i, range, group_of<true>(c, int64_t(stretch) * kGroupsInStretch + k));
}

__device__ __forceinline__ void push_stretches(const PeerCall& c, const Shared& s, Worker worker) {
  Range sent{0, 0};
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) sent = hull(sent, pushed_part(c, i));
#pragma unroll 1
  for (Deal stretch(c, sent, worker); stretch.next < stretch.end; stretch.next += stretch.step) {
    if (is_skipped(c, c.peer_gap, stretch.next)) continue;
#pragma unroll 1
    for (int i = 0; i < c.num_sources; ++i)
      push_stretch(c, parity_of(s.epoch), i, c.num_sources == 1 ? sent : pushed_part(c, i), stretch.next);
  }
}

// By one thread: the hulls of peers' rows and of this process's outputs.
__device__ __forceinline__ void find_hulls(const PeerCall& c, Shared& s) {
  Range far{0, 0}, wanted{0, 0};
#pragma unroll 1
  for (int r = 0; r < c.num_ranks; ++r)
    if (!s.rows[r].near) far = hull(far, s.rows[r].range);
#pragma unroll 1
  for (int q = 0; q < c.num_outputs; ++q)
    wanted = hull(wanted, chunk_range(c, c.outputs[q].begin, c.outputs[q].end - c.outputs[q].begin));
  s.far = far, s.wanted = wanted;
}

// The elements [begin, end) of the flat range, and how a range lies to them.
struct Span {
  int64_t begin, end;
  __device__ __forceinline__ bool meets(int64_t lo, int64_t hi) const { return lo < end && hi > begin && lo < hi; }
  __device__ __forceinline__ bool within(int64_t lo, int64_t hi) const { return lo <= begin && hi >= end; }
};

// How many rows a span lies in, all vectors whole and aligned; -1 if a row begins or ends inside it.
__device__ __forceinline__ int count_whole(const PeerCall& c, const Shared& s, Span span) {
  int count = 0;
#pragma unroll 1
  for (int r = 0; r < c.num_ranks; ++r) {
    const PeerRow& row = s.rows[r];
    if (!span.meets(row.range.begin, row.range.end)) continue;
    if (!span.within(row.range.begin, row.range.end)) return -1;
    if (row.near && reinterpret_cast<uint64_t>(row.origin) % 16 != 0) return -1;
    ++count;
  }
  return count;
}

// The only output that a span meets, and lies in.
constexpr int kNone = -1, kSeveral = -2;  // there is no output; there are several, or it does not lie in it
__device__ __forceinline__ int only_output(const PeerCall& c, Span span) {
  int found = kNone;
#pragma unroll 1
  for (int q = 0; q < c.num_outputs; ++q) {
    const int64_t lo = c.outputs[q].begin * c.width, hi = min(c.outputs[q].end * c.width, c.chunk_end);
    if (!span.meets(lo, hi)) continue;
    if (found != kNone || !span.within(lo, hi)) return kSeveral;
    found = q;
  }
  return found;
}

// The words of a stretch of one peer's row. False: the group of processes has failed.
__device__ __forceinline__ bool take_words(const PeerCall& c, Shared& s, int rank, char* from,
                                           uint4 (&words)[kColumns]) {
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) words[j] = load_word(from + j * 512);
    bool missing = false;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) missing |= is_empty(words[j]);
    if (!missing) break;
    if (spin % 128 == 0 && wait_is_over(c, c.owner[rank], s.epoch, &s.dead, since)) return false;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) empty_word(from + j * 512);
  return true;
}

// This lane's vectors in kCount columns of two rows from `first` on, which hold `span` as a whole or not at all (then
// zeros). `at`: bytes from the chunk's begin to the lane's first vector. What has come is emptied. False: the group of
// processes has failed.
template <int kCount>
__device__ __forceinline__ bool load_two(const PeerCall& c, Shared& s, int first, Span span, int64_t at,
                                         uint4 (&d)[2][kCount]) {
  char* inboxes[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const PeerRow& row = s.rows[min(first + i, c.num_ranks - 1)];
    const bool held = first + i < c.num_ranks && span.meets(row.range.begin, row.range.end);
    const char* from = row.origin + c.chunk_begin * c.in_bytes + at;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      d[i][j] = {0, 0, 0, 0};
      if (held && row.near) d[i][j] = load_private(from + j * 512);
    }
    if (held && !row.near) inboxes[i] = const_cast<char*>(row.origin) + at;
  }
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (inboxes[i] == nullptr) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) d[i][j] = load_word(inboxes[i] + j * 512);
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        if (is_empty(d[i][j])) missing = first + i;
    }
    if (missing < 0) break;
    if (spin % 128 == 0 && wait_is_over(c, c.owner[missing], s.epoch, &s.dead, since)) return false;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (inboxes[i] == nullptr) continue;
#pragma unroll
    for (int j = 0; j < kCount; ++j) empty_word(inboxes[i] + j * 512);
  }
  return true;
}

// Divides by the number of rows, scales, rounds and stores one vector.
template <typename T, typename Out>
__device__ __forceinline__ void finish_whole(const PeerCall& c, int count, acc_t<T> (&acc)[kVec<T>], Out* out) {
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j) {
    if (c.mean && count > 0) acc[j] = divide(acc[j], count);
    if (c.has_scale) acc[j] = multiply(acc[j], c.scale);
  }
  if (reinterpret_cast<uintptr_t>(out) % 16 == 0) return store_vector(out, acc);
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j) out[j] = round_to<Out>(acc[j]);
}

template <typename T>
__device__ __forceinline__ void add_word(acc_t<T> (&acc)[kVec<T>], uint4 v) {
  add_vector<T>(acc, Raw<T>{v.x, v.y, v.z, v.w});
}

// A stretch of `out` from one row each of this process and of a peer, or of one of them alone: all its vectors are
// loaded at once. What the sum of two is does not depend on their order. kPlain: it only has to be rounded and stored
// in whole vectors.
template <typename T, typename Out, bool kPlain>
__device__ __forceinline__ bool sum_two(const PeerCall& c, Shared& s, const char* near, char* far, int count,
                                        Out* out) {
  uint4 a[kColumns] = {}, b[kColumns] = {};
  if (near != nullptr) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) a[j] = load_private(near + j * 512);
  }
  if (far != nullptr && !take_words(c, s, s.rows[0].near, far, b)) return false;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    acc_t<T> acc[kVec<T>] = {};
    add_word<T>(acc, a[j]);
    add_word<T>(acc, b[j]);
    if constexpr (kPlain)
      store_vector(out + j * 32 * kVec<T>, acc);
    else
      finish_whole<T>(c, count, acc, out + j * 32 * kVec<T>);
  }
  return true;
}

// A stretch of any rows, some columns at a time.
template <typename T, typename Out>
__device__ __forceinline__ bool sum_many(const PeerCall& c, Shared& s, Span span, int64_t at, int count, Out* out) {
  constexpr int kCount = kColumns / 2;
#pragma unroll 1
  for (int first = 0; first < kColumns; first += kCount) {
    acc_t<T> acc[kCount][kVec<T>] = {};
#pragma unroll 1
    for (int r = 0; r < c.num_ranks; r += 2) {
      uint4 d[2][kCount];
#if SHARDSUM_PEER_MUTANT == 4  // stress test only: ranks in reverse
      if (!load_two<kCount>(c, s, (c.num_ranks - 1) / 2 * 2 - r, span, at + first * 512, d)) return false;
#else
      if (!load_two<kCount>(c, s, r, span, at + first * 512, d)) return false;
#endif
#pragma unroll
      for (int j = 0; j < kCount; ++j) add_word<T>(acc[j], d[0][j]), add_word<T>(acc[j], d[1][j]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) finish_whole<T>(c, count, acc[j], out + (first + j) * 32 * kVec<T>);
  }
  return true;
}

// A stretch that some row or output begins or ends in, or that is not aligned, or wanted by several outputs or none.
template <typename T, typename Out, DType kOut>
static __device__ __noinline__ bool sum_cut(const PeerCall& c, Shared& s, int stretch) {
#pragma unroll 1
  for (int k = 0; k < kGroupsInStretch; ++k) {
    if (!sum_group<T, Out, kOut>(c, s, group_of<true>(c, int64_t(stretch) * kGroupsInStretch + k))) return false;
  }
  return true;
}

template <typename T, typename Out, DType kOut>
__device__ __forceinline__ bool sum_stretch(const PeerCall& c, Shared& s, int stretch, Span span, bool far) {
  const int q = only_output(c, span);
  if (q == kNone && !far) return true;  // else words are to be emptied
  const int count = count_whole(c, s, span);
  if (count >= 0 && q >= 0) {
    const PeerOutput& output = c.outputs[q];
    Out* out = static_cast<Out*>(output.data) + (span.begin - output.begin * c.width) + lane_index() * kVec<T>;
    const int64_t at = word_offset<true>(int64_t(stretch) * kGroupsInStretch);
    if (c.num_ranks != 2 || s.rows[0].near == s.rows[1].near) return sum_many<T>(c, s, span, at, count, out);
    const PeerRow &mine = s.rows[s.rows[1].near], &theirs = s.rows[s.rows[0].near];
    const char* own = mine.origin + c.chunk_begin * int(sizeof(T)) + at;
    if (!span.meets(mine.range.begin, mine.range.end)) own = nullptr;
    char* inbox = span.meets(theirs.range.begin, theirs.range.end) ? const_cast<char*>(theirs.origin) + at : nullptr;
    if (!c.mean && !c.has_scale && reinterpret_cast<uintptr_t>(out) % 16 == 0)
      return sum_two<T, Out, true>(c, s, own, inbox, count, out);
    return sum_two<T, Out, false>(c, s, own, inbox, count, out);
  }
  return sum_cut<T, Out, kOut>(c, s, stretch);
}

// What no peer's row reaches comes first, while the others are under way.
template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_stretches(const PeerCall& c, Shared& s, Worker worker) {
  constexpr int kElements = kStretchBytes / int(sizeof(T));
#pragma unroll 1
  for (const bool far : {false, true}) {
#pragma unroll 1
    for (Deal stretch(c, far ? s.far : s.wanted, worker); stretch.next < stretch.end; stretch.next += stretch.step) {
      const int64_t begin = c.chunk_begin + int64_t(stretch.next) * kElements;
      const Span span{begin, begin + kElements};
      if (span.meets(s.far.begin, s.far.end) != far || (far && is_skipped(c, c.own_gap, stretch.next))) continue;
      if (!sum_stretch<T, Out, kOut>(c, s, stretch.next, span, far)) return;
    }
  }
}

template <typename T, typename Out, DType kOut>
__global__ void __launch_bounds__(kStreamThreads, 2) peer_stream_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  SHARDSUM_PEER_POINT(0, 6);
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const int warp = warp_index(), producers = c.producer_warps;
  if (warp < producers) {
    push_stretches(c, s, {warp, producers});
  } else {
    if (warp == kServiceWarp) {
      if (blockIdx.x == 0) send_rows(c, s);
      await_bounds(c, s);
      __syncwarp();
      if (lane_index() == 0) find_hulls(c, s);
    }
    SHARDSUM_PEER_POINT(s.epoch, 1);
    const bool dead = reader_barrier_or(kStreamThreads / 32 - producers, s.dead);
    SHARDSUM_PEER_POINT(s.epoch, 2);
    if (warp == kServiceWarp) {
      if (blockIdx.x == 0 && !dead) {
        fence_system();
        send_began(c, s);
        await_began(c, s);
      }
      if (lane_index() == 0) take_ticket(c, s);
    } else if (!dead) {
      sum_stretches<T, Out, kOut>(c, s, {warp - producers, kServiceWarp - producers});
    }
  }
  SHARDSUM_PEER_POINT(s.epoch, 3);
  const bool invalid = __syncthreads_or(s.dead);
  let_next_begin();
  if (invalid) fill_invalid(c);
}

}  // namespace

int peer_stream_launch(const PeerCall& call, void* stream) {
  switch (call.kind) {
#define SHARDSUM_LAUNCH(index, T, Out, in, out)                                                           \
  case index:                                                                                             \
    if constexpr (is_float_v<T>)                                                                          \
      return launch_peer_kernel(peer_stream_kernel<T, Out, DType::out>, call, kStreamThreads, 0, stream); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_LAUNCH)
#undef SHARDSUM_LAUNCH
  }
  return cudaErrorInvalidValue;
}

}  // namespace shardsum
