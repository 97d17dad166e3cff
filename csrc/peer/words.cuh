// 128-bit self-validating words, as in NCCL's LL128: what pushed rows travel in (push.cu, stream.cu).
//
// A word of an inbox is one 128-bit access that cannot be torn apart. An empty one has all bits set, so any other value
// is data that has arrived, as long as no data looks like an empty word. An element of a float dtype whose bits are all
// set is a NaN, and any NaN will do in a sum: a vector whose last 32 bits are all set is sent with the first of them
// cleared. Three vectors of integers are sent as four words, of which the last 32 bits are zero. Whoever has read a
// word empties it. Nothing needs a fence, a flag or a round trip, and floats need no room beside the data.
//
// The flat range is cut into groups of 32 lanes with N vectors each: vector i of lane l is the (32 i + l)-th of its
// group, and the words of a lane lie likewise, so that a warp's accesses are contiguous. Of floats a vector is sent
// where it overlaps the row; of integers a lane sends all words of a group or none.
#pragma once
#include "finish.cuh"

namespace shardsum {

constexpr uint32_t kEmpty = 0xffffffffu;
constexpr int kStretchBytes = 4096;  // of a large row, what one warp takes at a time
template <bool kFloats>
constexpr int kVectors = kFloats ? 2 : 3;  // of a lane in a group
template <bool kFloats>
constexpr int kWords = kFloats ? 2 : 4;  // that hold them
template <typename T>
constexpr bool is_float_v = std::is_floating_point_v<acc_t<T>>;

__device__ inline void store_word(char* p, uint4 v) {
  asm volatile(
      "{\n\t.reg .b64 a, b;\n\t.reg .b128 v;\n\tmov.b64 a, {%1, %2};\n\tmov.b64 b, {%3, %4};\n\t"
      "mov.b128 v, {a, b};\n\tst.relaxed.sys.global.b128 [%0], v;\n\t}" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
// Zeros where `valid` is false.
__device__ inline uint4 load_word(const char* p, bool valid = true) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .b64 a, b;\n\t.reg .b128 v;\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\tmov.b64 a, 0;\n\t"
      "mov.b128 v, {a, a};\n\t@p ld.relaxed.sys.global.b128 v, [%4];\n\tmov.b128 {a, b}, v;\n\t"
      "mov.b64 {%0, %1}, a;\n\tmov.b64 {%2, %3}, b;\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p), "r"(int(valid))
      : "memory");
  return v;
}
__device__ __forceinline__ void empty_word(char* p) {
#if SHARDSUM_PEER_MUTANT != 7  // stress test only: words are left where they are
  store_word(p, {kEmpty, kEmpty, kEmpty, kEmpty});
#endif
}
__device__ __forceinline__ bool is_empty(uint4 word) { return word.w == kEmpty; }
// Four bytes or more of floats as a word that is not empty.
__device__ __forceinline__ uint4 word_of(uint4 floats) {
  if (is_empty(floats)) floats.w = kEmpty >> 1;
  return floats;
}

// The words of a lane's vectors, none of them empty; and back.
__device__ __forceinline__ void pack(const uint4 (&d)[2], uint4 (&words)[2]) {
  words[0] = word_of(d[0]), words[1] = word_of(d[1]);
}
__device__ __forceinline__ void unpack(const uint4 (&words)[2], uint4 (&d)[2]) { d[0] = words[0], d[1] = words[1]; }
__device__ __forceinline__ void pack(const uint4 (&d)[3], uint4 (&words)[4]) {
  words[0] = {d[0].x, d[0].y, d[0].z, 0};
  words[1] = {d[0].w, d[1].x, d[1].y, 0};
  words[2] = {d[1].z, d[1].w, d[2].x, 0};
  words[3] = {d[2].y, d[2].z, d[2].w, 0};
}
__device__ __forceinline__ void unpack(const uint4 (&words)[4], uint4 (&d)[3]) {
  d[0] = {words[0].x, words[0].y, words[0].z, words[1].x};
  d[1] = {words[1].y, words[1].z, words[2].x, words[2].y};
  d[2] = {words[2].z, words[3].x, words[3].y, words[3].z};
}

// Where the word of the chunk's first vector would be in the inbox of virtual rank `rank` on `process`; of a large row
// only what is needed has room there. And this lane's first word of a group, the next ones 512 bytes apart.
__device__ __forceinline__ char* inbox(const PeerCall& c, int process, int parity, int rank) {
  const int64_t before = max(c.need_begin[rank] * c.width - c.chunk_begin, int64_t(0)) * c.in_bytes;
  const int64_t skipped = c.producer_warps > 0 ? before & ~int64_t(kStretchBytes - 1) : 0;
  return c.base[process] + c.staging_at + parity * c.staging_bytes + c.slot[rank] * c.row_bytes - skipped;
}
template <bool kFloats>
__device__ __forceinline__ int64_t word_offset(int64_t group) {
  return group * (32 * kWords<kFloats> * 16) + lane_index() * 16;
}

// The chunk's bytes in groups: `at` is where this lane's first vector begins.
template <bool kFloats>
__device__ __forceinline__ int64_t num_groups(const PeerCall& c) {
  constexpr int kBytes = 32 * kVectors<kFloats> * 16;
  return ((c.chunk_end - c.chunk_begin) * c.in_bytes + kBytes - 1) / kBytes;
}
struct Group {
  int64_t index, at;
};
template <bool kFloats>
__device__ __forceinline__ Group group_of(const PeerCall& c, int64_t index) {
  return {index, c.chunk_begin * c.in_bytes + (index * 32 * kVectors<kFloats> + lane_index()) * 16};
}

// Bit j: this lane's word j of a group is sent for a row that holds the bytes [lo, hi).
template <bool kFloats>
__device__ __forceinline__ unsigned sent_words(int64_t at, int64_t lo, int64_t hi) {
  unsigned bits = 0;
#pragma unroll
  for (int j = 0; j < kVectors<kFloats>; ++j) bits |= unsigned(at + j * 512 + 16 > lo && at + j * 512 < hi) << j;
  if (lo >= hi) return 0;  // which may lie inside a vector
  return kFloats || bits == 0 ? bits : 0xf;
}

// 16 bytes of a held row, with zeros outside it.
static __device__ __noinline__ uint4 load_held_part(const char* origin, int64_t at, int64_t lo, int64_t hi) {
  if (at >= lo && at + 16 <= hi) return load_any_address(origin + at);
  uint32_t w[4] = {};
  for (int i = 0; i < 16; ++i)
    if (at + i >= lo && at + i < hi) w[i / 4] |= uint32_t(static_cast<uint8_t>(origin[at + i])) << (i % 4 * 8);
  return {w[0], w[1], w[2], w[3]};
}

// This lane's vectors of a group, of a row of this process that holds the bytes [lo, hi).
template <int N>
__device__ __forceinline__ void load_held(const char* origin, int64_t at, int64_t lo, int64_t hi, uint4 (&d)[N]) {
  const bool aligned = reinterpret_cast<uint64_t>(origin) % 16 == 0;
#pragma unroll
  for (int i = 0; i < N; ++i, at += 32 * 16) {
    d[i] = {0, 0, 0, 0};
    if (aligned && at >= lo && at + 16 <= hi)
      d[i] = load_private(origin + at);
    else if (at + 16 > lo && at < hi)
      d[i] = load_held_part(origin, at, lo, hi);
  }
}

// The k-th of the processes that this one pushes to.
__device__ __forceinline__ int peer_of(const PeerCall& c, int k) {
  const int g = c.process + 1 + k;
  return g < c.num_processes ? g : g - c.num_processes;
}

// What is pushed of source i.
__device__ __forceinline__ Range pushed_part(const PeerCall& c, int i) {
  return needed_part(c, c.sources[i].rank, chunk_range(c, c.held[i].start, c.held[i].length));
}

// Source i's part of one group goes to all peers.
template <bool kFloats>
__device__ __forceinline__ void push_group(const PeerCall& c, int parity, int i, Range range, const Group& group) {
  const HeldRow& h = c.held[i];
  const int64_t lo = range.begin * c.in_bytes, hi = range.end * c.in_bytes;
  const unsigned sent = sent_words<kFloats>(group.at, lo, hi);
  if (sent == 0) return;
  uint4 d[kVectors<kFloats>], words[kWords<kFloats>];
  load_held(h.origin, group.at, lo, hi, d);
  pack(d, words);
#pragma unroll 1
  for (int k = 0; k + 1 < c.num_processes; ++k) {
    char* to = inbox(c, peer_of(c, k), parity, c.sources[i].rank) + word_offset<kFloats>(group.index);
#if SHARDSUM_PEER_MUTANT == 2  // stress test only: words that seem to be there before the data
    for (int j = 0; j < kWords<kFloats>; ++j)
      if (sent >> j & 1) store_word(to + j * 512, {0, 0, 0, 0});
#endif
#pragma unroll
    for (int j = 0; j < kWords<kFloats>; ++j)
      if (sent >> j & 1) store_word(to + j * 512, words[j]);
  }
}

// By one warp of each block: rows and their bounds. A row of this process keeps its caller's address.
__device__ __forceinline__ void await_bounds(const PeerCall& c, Shared& s) {
  const int parity = parity_of(s.epoch);
#pragma unroll 1
  for (int r = lane_index(); r < c.num_ranks; r += 32) {
    const int owner = c.owner[r];
    const bool near = owner == c.process;
    RowFlag came{};
    if (near)
      came.start = c.held[c.place[r]].start, came.length = c.held[c.place[r]].length;
    else if (!await_row(c, s, owner, row_flag(c, c.process, parity, 0, r), came))
      continue;
    const char* origin = near ? c.held[c.place[r]].origin : inbox(c, c.process, parity, r);
    const Range range = chunk_range(c, uint32_t(came.start), uint32_t(came.length));
    s.rows[r] = {origin, near ? range : needed_part(c, r, range), near};
  }
}

// This lane's vectors of a group, of kRows rows from `first` on, zeros where a row has none. What has come is emptied.
// False: the group of processes has failed.
template <bool kFloats, int kRows>
__device__ __forceinline__ bool load_rows(const PeerCall& c, Shared& s, int first, const Group& group,
                                          uint4 (&d)[kRows][kVectors<kFloats>]) {
  char* inboxes[kRows] = {};
  unsigned sent[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first + i;
#pragma unroll
    for (int j = 0; j < kVectors<kFloats>; ++j) d[i][j] = {0, 0, 0, 0};
    if (r >= c.num_ranks) continue;
    const PeerRow& row = s.rows[r];
    const int64_t lo = row.range.begin * c.in_bytes, hi = row.range.end * c.in_bytes;
    if (row.near) {
      load_held(row.origin, group.at, lo, hi, d[i]);
    } else {
      sent[i] = sent_words<kFloats>(group.at, lo, hi);
      inboxes[i] = const_cast<char*>(row.origin) + word_offset<kFloats>(group.index);
    }
  }
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (sent[i] == 0) continue;
      uint4 words[kWords<kFloats>];
#pragma unroll
      for (int j = 0; j < kWords<kFloats>; ++j) words[j] = load_word(inboxes[i] + j * 512, sent[i] >> j & 1);
#pragma unroll
      for (int j = 0; j < kWords<kFloats>; ++j)
        if (is_empty(words[j])) missing = first + i;
      unpack(words, d[i]);
    }
    if (missing < 0) break;
    if (spin % 128 == 0 && wait_is_over(c, c.owner[missing], s.epoch, &s.dead, since)) return false;
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kWords<kFloats>; ++j)
      if (sent[i] >> j & 1) empty_word(inboxes[i] + j * 512);
  }
  return true;
}

// The elements [lo, hi) of one vector of an output: divide, scale, round, store.
template <typename T, DType kOut>
static __device__ __noinline__ void finish_any(const PeerCall& c, const Shared& s, int q, int64_t at, int64_t lo,
                                               int64_t hi, acc_t<T>* sums) {
  constexpr int V = kVec<T>;
  Epilogue e{};
  e.out = static_cast<char*>(c.outputs[q].data) - lo * c.out_bytes;
  e.out_dtype = kOut;
  e.plain = !c.mean && !c.has_scale;
  e.mean = c.mean, e.has_scale = c.has_scale, e.scale = c.scale;
  acc_t<T> acc[V];
#pragma unroll
  for (int j = 0; j < V; ++j) acc[j] = sums[j];
  int count[V] = {};
  if (e.mean) {
#pragma unroll 1
    for (int r = 0; r < c.num_ranks; ++r) count_vector<V>(count, at, s.rows[r].range.begin, s.rows[r].range.end);
  }
  finish_part<acc_t<T>, V>(e, at, lo, hi, acc, count);
}
template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void finish_vector(const PeerCall& c, const Shared& s, int q, int64_t at,
                                              const acc_t<T> (&acc)[kVec<T>]) {
  constexpr int V = kVec<T>;
  const int64_t lo = c.outputs[q].begin * c.width, hi = min(c.outputs[q].end * c.width, c.chunk_end);
  if (at + V <= lo || at >= hi) return;
  Out* out = static_cast<Out*>(c.outputs[q].data) + (at - lo);
  if (!c.mean && !c.has_scale && at >= lo && at + V <= hi && reinterpret_cast<uintptr_t>(out) % 16 == 0)
    return store_vector(out, acc);
  acc_t<T> sums[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = acc[j];
  finish_any<T, kOut>(c, s, q, at, lo, hi, sums);
}

// Sums one group of all rows, in virtual-rank order, into every output that it overlaps. False: the group of processes
// has failed.
template <typename T, typename Out, DType kOut>
__device__ __forceinline__ bool sum_group(const PeerCall& c, Shared& s, const Group& group) {
  constexpr bool kFloats = is_float_v<T>;
  constexpr int V = kVec<T>, N = kVectors<kFloats>, kRows = sizeof(acc_t<T>) > 4 ? 1 : 2;
  acc_t<T> acc[N][V] = {};
#pragma unroll 1
  for (int n = 0; n < c.num_ranks; n += kRows) {
    uint4 d[kRows][N];
#if SHARDSUM_PEER_MUTANT == 4  // stress test only: ranks in reverse
    const int first = (c.num_ranks - 1) / kRows * kRows - n;
#else
    const int first = n;
#endif
    if (!load_rows<kFloats, kRows>(c, s, first, group, d)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int v = 0; v < N; ++v) add_vector<T>(acc[v], Raw<T>{d[i][v].x, d[i][v].y, d[i][v].z, d[i][v].w});
    }
  }
  const int64_t at = group.at / int(sizeof(T));
#pragma unroll 1
  for (int q = 0; q < c.num_outputs; ++q) {
#pragma unroll
    for (int v = 0; v < N; ++v) finish_vector<T, Out, kOut>(c, s, q, at + v * 32 * V, acc[v]);
  }
  return true;
}

}  // namespace shardsum
