// A small sum in one launch: every process pushes its rows into its peers' inboxes, word by word with the epoch beside
// the data, and sums what arrives. No fence and no round trip lies between a peer's data and the sum.
//
// A word of an inbox is {96 bits of data, 32 bits of epoch} in one 128-bit access: data is valid once its epoch is this
// launch's. A lane sends three vectors of 16 bytes in four words. The flat range is cut into groups of 32 lanes, 1536
// bytes; vector i of lane l is the (32 i + l)-th of its group, and the words lie likewise, so that a warp's accesses
// are contiguous. Inboxes have two halves, used by odd and even launches. The rows' bounds come in words with an epoch,
// too, the flags of block 0. Beside all this the launch is settled: every process releases that it has begun it, and
// ends it when all have (docs/peer.md).
#include <cuda_runtime.h>

#include "peer_finish.cuh"
#include "peer_push.h"

namespace shardsum {
namespace {

constexpr int kVectors = 3, kWords = 4;   // of a lane in a group
constexpr int kRegisters = kVectors * 4;  // their 32-bit parts
constexpr int kGroupVectors = 32 * kVectors;
constexpr int kPushWarps = 6;  // the warps after them exchange bounds, and settle the launch
constexpr int kBoundsWarp = kPushWarps, kSettleWarp = kPushWarps + 1;
constexpr int kPushThreads = (kPushWarps + 2) * 32;
template <typename T>
constexpr int kPushRows = sizeof(acc_t<T>) > 4 ? 1 : 2;  // rows whose words a lane loads at once

// {x, y, z} are data, w is an epoch: one access that cannot be torn apart.
__device__ inline void store_word(char* p, uint4 v) {
  asm volatile(
      "{\n\t.reg .b64 a, b;\n\t.reg .b128 v;\n\tmov.b64 a, {%1, %2};\n\tmov.b64 b, {%3, %4};\n\t"
      "mov.b128 v, {a, b};\n\tst.relaxed.sys.global.b128 [%0], v;\n\t}" ::"l"(p),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}
__device__ inline uint4 load_word(const char* p) {
  uint4 v;
  asm volatile(
      "{\n\t.reg .b64 a, b;\n\t.reg .b128 v;\n\tld.relaxed.sys.global.b128 v, [%4];\n\tmov.b128 {a, b}, v;\n\t"
      "mov.b64 {%0, %1}, a;\n\tmov.b64 {%2, %3}, b;\n\t}"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}

// The inbox of virtual rank `rank` on `process`; and this lane's first word of a group, the next ones 512 bytes apart.
__device__ __forceinline__ char* inbox(const PeerCall& c, int process, int parity, int rank) {
  return c.base[process] + c.inbox_at + (int64_t(parity) * c.flag_ranks + rank) * c.inbox_row_bytes;
}
__device__ __forceinline__ int64_t word_offset(int group) {
  return int64_t(group) * (32 * kWords * 16) + lane_index() * 16;
}

// 16 bytes of a held row, with zeros outside it.
static __device__ __noinline__ uint4 load_held_part(const char* origin, int64_t at, int64_t lo, int64_t hi) {
  uint32_t w[4] = {};
  for (int i = 0; i < 16; ++i)
    if (at + i >= lo && at + i < hi) w[i / 4] |= uint32_t(static_cast<uint8_t>(origin[at + i])) << (i % 4 * 8);
  return {w[0], w[1], w[2], w[3]};
}

// This lane's vectors of a group, of a row of this process that holds the bytes [lo, hi).
__device__ __forceinline__ void load_held(const char* origin, int64_t at, int64_t lo, int64_t hi,
                                          uint32_t (&d)[kRegisters]) {
  const bool aligned = reinterpret_cast<uint64_t>(origin) % 16 == 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i, at += 32 * 16) {
    uint4 v = {0, 0, 0, 0};
    if (aligned && at >= lo && at + 16 <= hi)
      v = load_private(origin + at);
    else if (at + 16 > lo && at < hi)
      v = load_held_part(origin, at, lo, hi);
    d[4 * i] = v.x, d[4 * i + 1] = v.y, d[4 * i + 2] = v.z, d[4 * i + 3] = v.w;
  }
}

// Whether any of this lane's vectors of a group, the first of which is at `at`, overlaps the bytes [lo, hi): such a
// lane sends, and is sent, all its words.
__device__ __forceinline__ bool sends(int64_t at, int64_t lo, int64_t hi) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) any |= at + i * 32 * 16 + 16 > lo && at + i * 32 * 16 < hi;
  return any;
}

// Groups are dealt to the blocks, then to their warps.
__device__ __forceinline__ int first_group() { return warp_index() * int(gridDim.x) + int(blockIdx.x); }
__device__ __forceinline__ int group_step() { return int(gridDim.x) * kPushWarps; }
__device__ __forceinline__ int num_groups(const PeerCall& c) {
  return int((c.chunk_end * c.in_bytes + kGroupVectors * 16 - 1) / (kGroupVectors * 16));
}
__device__ __forceinline__ int64_t group_begin(int group) {  // in bytes, for this lane
  return (int64_t(group) * kGroupVectors + lane_index()) * 16;
}

__device__ __forceinline__ void push_groups(const PeerCall& c, const Shared& s) {
  const int parity = parity_of(s.epoch), groups = num_groups(c);
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) {
    const HeldRow& h = c.held[i];
    const int64_t lo = h.start * c.width * c.in_bytes, hi = (int64_t(h.start) + h.length) * c.width * c.in_bytes;
#pragma unroll 1
    for (int group = first_group(); group < groups; group += group_step()) {
      const int64_t at = group_begin(group);
      if (!sends(at, lo, hi)) continue;
      uint32_t d[kRegisters];
      load_held(h.origin, at, lo, hi, d);
#pragma unroll 1
      for (int k = 1; k < c.num_processes; ++k) {
        const int g = c.process + k < c.num_processes ? c.process + k : c.process + k - c.num_processes;
        char* to = inbox(c, g, parity, c.sources[i].rank) + word_offset(group);
#if SHARDSUM_PEER_MUTANT == 2  // stress test only: the epoch before the data
        for (int j = 0; j < kWords; ++j) store_word(to + j * 512, {0, 0, 0, s.epoch});
#endif
#pragma unroll
        for (int j = 0; j < kWords; ++j) store_word(to + j * 512, {d[3 * j], d[3 * j + 1], d[3 * j + 2], s.epoch});
      }
    }
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
    s.rows[r] = {origin, chunk_range(c, uint32_t(came.start), uint32_t(came.length)), near};
  }
}

// This lane's vectors of a group, of kRows rows from `first` on, zeros where a row has none. False: the group of
// processes has failed.
template <int kRows>
__device__ __forceinline__ bool load_rows(const PeerCall& c, Shared& s, int first, int group,
                                          uint32_t (&d)[kRows][kRegisters]) {
  const int64_t at = group_begin(group);
  const char* remote[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int r = first + i;
#pragma unroll
    for (int j = 0; j < kRegisters; ++j) d[i][j] = 0;
    if (r >= c.num_ranks) continue;
    const PeerRow& row = s.rows[r];
    const int64_t lo = row.range.begin * c.in_bytes, hi = row.range.end * c.in_bytes;
    if (!sends(at, lo, hi)) continue;
    if (row.near)
      load_held(row.origin, at, lo, hi, d[i]);
    else
      remote[i] = row.origin + word_offset(group);
  }
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    int missing = -1;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (remote[i] == nullptr) continue;
      uint4 words[kWords];
#pragma unroll
      for (int j = 0; j < kWords; ++j) words[j] = load_word(remote[i] + j * 512);
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        if (!is_of(uint64_t(words[j].w) << 32, s.epoch)) missing = first + i;
        d[i][3 * j] = words[j].x, d[i][3 * j + 1] = words[j].y, d[i][3 * j + 2] = words[j].z;
      }
    }
    if (missing < 0) return true;
    if (spin % 128 == 0 && wait_is_over(c, c.owner[missing], s.epoch, &s.dead, since)) return false;
  }
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
  const int64_t lo = c.outputs[q].begin * c.width, hi = c.outputs[q].end * c.width;
  if (at + V <= lo || at >= hi) return;
  Out* out = static_cast<Out*>(c.outputs[q].data) + (at - lo);
  if (!c.mean && !c.has_scale && at >= lo && at + V <= hi && reinterpret_cast<uintptr_t>(out) % 16 == 0)
    return store_vector(out, acc);
  acc_t<T> sums[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sums[j] = acc[j];
  finish_any<T, kOut>(c, s, q, at, lo, hi, sums);
}

template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_groups(const PeerCall& c, Shared& s) {
  constexpr int V = kVec<T>, kRows = kPushRows<T>;
  const int groups = num_groups(c);
#pragma unroll 1
  for (int group = first_group(); group < groups; group += group_step()) {
    const int64_t at = group_begin(group) / int(sizeof(T));
#pragma unroll 1
    for (int q = 0; q < c.num_outputs; ++q) {
      if (!sends(group_begin(group), c.outputs[q].begin * c.width * c.in_bytes,
                 c.outputs[q].end * c.width * c.in_bytes))
        continue;
      acc_t<T> acc[kVectors][V] = {};
#pragma unroll 1
      for (int n = 0; n < c.num_ranks; n += kRows) {
        uint32_t d[kRows][kRegisters];
#if SHARDSUM_PEER_MUTANT == 4  // stress test only: ranks in reverse
        const int first = (c.num_ranks - 1) / kRows * kRows - n;
#else
        const int first = n;
#endif
        if (!load_rows(c, s, first, group, d)) return;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int v = 0; v < kVectors; ++v)
            add_vector<T>(acc[v], Raw<T>{d[i][4 * v], d[i][4 * v + 1], d[i][4 * v + 2], d[i][4 * v + 3]});
        }
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v) finish_vector<T, Out, kOut>(c, s, q, at + v * 32 * V, acc[v]);
    }
  }
}

__device__ __forceinline__ void sum_all(const PeerCall& c, Shared& s) {
  switch (c.kind) {
#define SHARDSUM_SUM(index, T, Out, in, out_dtype)                           \
  case index:                                                                \
    if constexpr (sizeof(T) > 1) sum_groups<T, Out, DType::out_dtype>(c, s); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_SUM)
#undef SHARDSUM_SUM
    default:
      break;
  }
}

__global__ void __launch_bounds__(kPushThreads, 2) peer_push_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  SHARDSUM_PEER_POINT(0, 6);
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const int warp = warp_index();
  if (warp < kPushWarps) {
    push_groups(c, s);
  } else if (warp == kBoundsWarp) {
    if (blockIdx.x == 0) send_rows(c, s);
    await_bounds(c, s);
  } else if (blockIdx.x == 0) {
    fence_system();
    send_began(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 1);
  const bool dead = __syncthreads_or(s.dead);
  SHARDSUM_PEER_POINT(s.epoch, 2);
  if (warp == kSettleWarp) {
    if (blockIdx.x == 0 && !dead) await_began(c, s);
    if (lane_index() == 0) take_ticket(c, s);
  } else if (warp < kPushWarps && !dead) {
    sum_all(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 3);
  const bool invalid = __syncthreads_or(s.dead);
  let_next_begin();
  if (invalid) fill_invalid(c);
}

}  // namespace

int peer_push_launch(const PeerCall& call, void* stream) {
  return launch_peer_kernel(peer_push_kernel, call, kPushThreads, 0, stream);
}

}  // namespace shardsum
