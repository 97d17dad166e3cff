// A small sum in one launch: every process pushes its rows into its peers' inboxes, word by word with the epoch beside
// it, and sums what arrives. No fence and no round trip lies between a peer's data and the sum.
//
// A word of an inbox is {32 bits of data, 32 bits of epoch} in one 64-bit access: data is valid once its epoch is this
// launch's. A cell is 16 bytes of a row, four such words; cell i of a row holds the bytes [16 i, 16 i + 16) of the flat
// range. 32 cells lie together, their first halves before their second, so that a warp's accesses are contiguous.
// Inboxes have two halves, used by odd and even launches. The rows' flags (of block 0) are released at the beginning:
// they carry the bounds, and say that their sender has read what the launch before brought (docs/peer.md).
#include <cuda_runtime.h>

#include "peer_finish.cuh"
#include "peer_push.h"

namespace shardsum {
namespace {

constexpr int kCellBytes = 16;
constexpr int kPushWarps = kPeerThreads / 32;  // the warp after them signals and waits
constexpr int kPushRows = 2;                   // rows whose cells a thread loads at once

struct Word4 {
  uint64_t w[4];
};

// The inbox of virtual rank `rank` on `process`.
__device__ __forceinline__ char* inbox(const PeerCall& c, int process, int parity, int rank) {
  return c.base[process] + c.inbox_at + (int64_t(parity) * c.flag_ranks + rank) * c.inbox_row_bytes;
}
// The first half of a cell; the second lies kHalf words behind.
constexpr int kHalf = 64;
__device__ __forceinline__ uint64_t* inbox_cell(const char* row, int cell) {
  return reinterpret_cast<uint64_t*>(const_cast<char*>(row)) + (cell / 32) * 128 + cell % 32 * 2;
}

__device__ __forceinline__ Word4 load_words(const uint64_t* p) {
  Word4 v;
  load_flags(p, v.w[0], v.w[1]);
  load_flags(p + kHalf, v.w[2], v.w[3]);
  return v;
}
__device__ __forceinline__ bool is_whole(const Word4& v, uint32_t epoch) {
  return is_of(v.w[0], epoch) && is_of(v.w[1], epoch) && is_of(v.w[2], epoch) && is_of(v.w[3], epoch);
}

// 16 bytes of a held row, with zeros outside it.
static __device__ __noinline__ uint4 load_held_part(const char* origin, int64_t at, int64_t lo, int64_t hi) {
  uint32_t w[4] = {};
  for (int i = 0; i < kCellBytes; ++i)
    if (at + i >= lo && at + i < hi) w[i / 4] |= uint32_t(static_cast<uint8_t>(origin[at + i])) << (i % 4 * 8);
  return {w[0], w[1], w[2], w[3]};
}
__device__ __forceinline__ uint4 load_held(const char* origin, int64_t at, int64_t lo, int64_t hi) {
  const bool whole = at >= lo && at + kCellBytes <= hi && reinterpret_cast<uint64_t>(origin) % 16 == 0;
  return whole ? load_private(origin + at) : load_held_part(origin, at, lo, hi);
}

// Every block's part of the cells, round robin.
__device__ __forceinline__ int first_cell() { return int(blockIdx.x) * kPeerThreads + int(threadIdx.x); }
__device__ __forceinline__ int cell_step() { return int(gridDim.x) * kPeerThreads; }
__device__ __forceinline__ int num_cells(const PeerCall& c) {
  return int((c.chunk_end * c.in_bytes + kCellBytes - 1) / kCellBytes);
}

__device__ __forceinline__ void push_cells(const PeerCall& c, const Shared& s) {
  const int parity = parity_of(s.epoch), cells = num_cells(c);
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) {
    const HeldRow& h = c.held[i];
    const int64_t lo = h.start * c.width * c.in_bytes, hi = (int64_t(h.start) + h.length) * c.width * c.in_bytes;
#pragma unroll 1
    for (int cell = first_cell(); cell < cells; cell += cell_step()) {
      const int64_t at = int64_t(cell) * kCellBytes;
      if (at + kCellBytes <= lo || at >= hi) continue;
      const uint4 v = load_held(h.origin, at, lo, hi);
#pragma unroll 1
      for (int k = 1; k < c.num_processes; ++k) {
        const int g = c.process + k < c.num_processes ? c.process + k : c.process + k - c.num_processes;
        uint64_t* to = inbox_cell(inbox(c, g, parity, c.sources[i].rank), cell);
        store_flags(to, flag_word(s.epoch, v.x), flag_word(s.epoch, v.y));
        store_flags(to + kHalf, flag_word(s.epoch, v.z), flag_word(s.epoch, v.w));
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
    RowFlag came;
    if (!await_row(c, s, owner, row_flag(c, c.process, parity, 0, r), came)) continue;
    const char* origin = owner == c.process ? c.held[c.slot[r]].origin : inbox(c, c.process, parity, r);
    s.rows[r] = {origin, chunk_range(c, uint32_t(came.start), uint32_t(came.length))};
  }
}

// The cells of kPushRows rows from `first` on, zeros where a row has none. False: the group has failed.
template <typename T>
__device__ __forceinline__ bool load_cells(const PeerCall& c, Shared& s, int first, int cell,
                                           Raw<T> (&raw)[kPushRows]) {
  const int64_t at = int64_t(cell) * kVec<T>;
  const uint64_t* remote[kPushRows] = {};
#pragma unroll
  for (int i = 0; i < kPushRows; ++i) {
    const int r = first + i;
    raw[i] = {};
    if (r >= c.num_ranks) continue;
    const PeerRow& row = s.rows[r];
    const int64_t lo = row.range.begin, hi = row.range.end;
    if (at + kVec<T> <= lo || at >= hi) continue;
    if (c.owner[r] != c.process) {
      remote[i] = inbox_cell(row.origin, cell);
    } else {
      const uint4 v = load_held(row.origin, at * c.in_bytes, lo * c.in_bytes, hi * c.in_bytes);
      raw[i].w[0] = v.x, raw[i].w[1] = v.y, raw[i].w[2] = v.z, raw[i].w[3] = v.w;
    }
  }
  uint64_t since = 0;
  for (uint32_t spin = 1;; ++spin) {
    int missing = -1;
    Word4 words[kPushRows];
#pragma unroll
    for (int i = 0; i < kPushRows; ++i)
      if (remote[i] != nullptr) words[i] = load_words(remote[i]);
#pragma unroll
    for (int i = 0; i < kPushRows; ++i) {
      if (remote[i] == nullptr) continue;
      if (!is_whole(words[i], s.epoch)) missing = first + i;
#pragma unroll
      for (int j = 0; j < 4; ++j) raw[i].w[j] = uint32_t(words[i].w[j]);
    }
    if (missing < 0) return true;
    if (spin % 128 == 0 && wait_is_over(c, c.owner[missing], s.epoch, &s.dead, since)) return false;
  }
}

template <typename T, DType kOut>
__device__ __forceinline__ void sum_cells(const PeerCall& c, Shared& s) {
  constexpr int V = kVec<T>;
  Epilogue e{};
  e.out_dtype = kOut;
  e.plain = !c.mean && !c.has_scale;
  e.mean = c.mean, e.has_scale = c.has_scale, e.scale = c.scale;
  const int cells = num_cells(c);
#pragma unroll 1
  for (int cell = first_cell(); cell < cells; cell += cell_step()) {
    const int64_t at = int64_t(cell) * V;
#pragma unroll 1
    for (int q = 0; q < c.num_outputs; ++q) {
      const int64_t lo = c.outputs[q].begin * c.width, hi = c.outputs[q].end * c.width;
      if (at + V <= lo || at >= hi) continue;
      acc_t<T> acc[V] = {};
      int count[V] = {};
#pragma unroll 1
      for (int r = 0; r < c.num_ranks; r += kPushRows) {
        Raw<T> raw[kPushRows];
        if (!load_cells<T>(c, s, r, cell, raw)) return;
#pragma unroll
        for (int i = 0; i < kPushRows; ++i) add_vector<T>(acc, raw[i]);
      }
      if (e.mean) {
#pragma unroll 1
        for (int r = 0; r < c.num_ranks; ++r) count_vector<V>(count, at, s.rows[r].range.begin, s.rows[r].range.end);
      }
      e.out = static_cast<char*>(c.outputs[q].data) - lo * c.out_bytes;
      finish_part<acc_t<T>, V>(e, at, lo, hi, acc, count);
    }
  }
}

__device__ __forceinline__ void sum_all(const PeerCall& c, Shared& s) {
  switch (c.kind) {
#define SHARDSUM_SUM(index, T, Out, in, out_dtype)                     \
  case index:                                                          \
    if constexpr (sizeof(T) > 1) sum_cells<T, DType::out_dtype>(c, s); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_SUM)
#undef SHARDSUM_SUM
    default:
      break;
  }
}

__global__ void __launch_bounds__(kPeerThreads + 32, 2) peer_push_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  SHARDSUM_PEER_POINT(0, 6);
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const bool helper = warp_index() == kPushWarps;
  if (!helper) {
    push_cells(c, s);
  } else {
    if (blockIdx.x == 0) send_rows(c, s);
    await_bounds(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 1);
  const bool dead = __syncthreads_or(s.dead);
  SHARDSUM_PEER_POINT(s.epoch, 2);
  if (helper) {
    if (lane_index() == 0) take_ticket(c, s);
  } else if (!dead) {
    sum_all(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 3);
  if (__syncthreads_or(s.dead)) fill_invalid(c);
}

}  // namespace

int peer_push_launch(const PeerCall& call, void* stream) {
  peer_push_kernel<<<call.num_blocks, kPeerThreads + 32, 0, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}

}  // namespace shardsum
