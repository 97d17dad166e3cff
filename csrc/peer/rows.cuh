// Where rows lie, and copying them: the block's table of sources and rows, the tile map, copies by whole warps.
//
// The staged part of a row starts at the 16-byte boundary of flat indices before its first element and is filled up
// with zeros at both ends: every row is read in whole aligned vectors, whatever its bounds. Rows that are read where
// the caller put them are those whose address and bounds are multiples of 16 bytes as they are.
#pragma once
#include "../cuda/arith.cuh"
#include "signal.cuh"

namespace shardsum {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline int warp_index() { return threadIdx.x / 32; }
__device__ inline int lane_index() { return threadIdx.x % 32; }

struct Range {
  int64_t begin, end;  // flat elements
};
__host__ __device__ inline Range clip(Range a, int64_t begin, int64_t end) {
  a.begin = a.begin > begin ? a.begin : begin;
  a.end = a.end < end ? a.end : end;
  if (a.end < a.begin) a.end = a.begin;
  return a;
}

// A row as this process reads it.
struct PeerRow {
  const char* origin;  // where element 0 would be
  Range range;
  bool near;  // it is read where this process's caller put it
};

// The elements of the chunk that `length` positions from `start` cover.
__host__ __device__ inline Range chunk_range(const PeerCall& c, uint32_t start, uint32_t length) {
  return clip({start * c.width, (int64_t(start) + length) * c.width}, c.chunk_begin, c.chunk_end);
}

// The part of a range of a virtual rank's row that other processes read, in whole vectors.
__host__ __device__ inline Range needed_part(const PeerCall& c, int rank, Range range) {
  const int64_t last = 16 / c.in_bytes - 1;
  return clip(range, c.need_begin[rank] * c.width & ~last, (c.need_end[rank] * c.width + last) & ~last);
}

// Whether elements [begin, end), at least one, lie in a gap.
__host__ __device__ inline bool is_inside(const PeerCall& c, Gap gap, int64_t begin, int64_t end) {
  return gap.begin * c.width <= begin && end <= gap.end * c.width;
}

// Source i, whose row has `length` positions from `start`.
__host__ __device__ inline HeldRow describe_held(const PeerCall& c, int i, uint32_t start, uint32_t length) {
  const PeerSource& source = c.sources[i];
  HeldRow h;
  h.start = start;
  const int64_t room = start < c.size ? c.size - start : 0;  // no output may reach as far as the row's start
  h.length = length < room ? length : uint32_t(room);
  const Range range = chunk_range(c, h.start, h.length);
  h.origin = static_cast<const char*>(source.data) - start * c.width * c.in_bytes;
  const uint64_t bounds = reinterpret_cast<uint64_t>(h.origin) | range.begin * c.in_bytes | range.end * c.in_bytes;
  h.direct = bounds % 16 == 0;
  h.staged_origin = c.slot[source.rank] * c.row_bytes - (range.begin * c.in_bytes & ~int64_t(15));
  const Range copied = h.direct ? needed_part(c, source.rank, range) : range;
  h.copied_begin = copied.begin, h.copied_end = copied.end;
  return h;
}

__device__ inline uint32_t clamped(const void* values, int i, bool index64, int64_t limit) {
  const int64_t v = index64 ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  return uint32_t(min(max(v, int64_t(0)), limit));
}

// Source i with the length that the device holds.
static __device__ __noinline__ void describe_from_device(const PeerCall& c, int i, HeldRow& held) {
  held = describe_held(c, i, 0, clamped(c.device_lengths, i, c.index64, c.sources[i].capacity));
}

// The tile map.
__host__ __device__ inline int64_t num_tiles(const PeerCall& c) {
  return (c.chunk_end - c.chunk_begin + c.tile_elements - 1) / c.tile_elements;
}
__device__ inline int64_t tile_of(const PeerCall& c, int piece, int j) {
  return blockIdx.x + (int64_t(piece) * c.tiles_per_piece + j) * c.num_blocks;
}
__device__ inline Range tile_range(const PeerCall& c, int64_t tile) {
  const int64_t begin = c.chunk_begin + tile * c.tile_elements;
  return clip({begin, begin + c.tile_elements}, c.chunk_begin, c.chunk_end);
}

// What one warp takes at a time: elements [lo, hi) of those from `first` on, in `tile`.
struct Stretch {
  int64_t tile, first, lo, hi;
};

// The w-th stretch of a process's part of a piece, cut to [begin, end). Only in a two-shot are there several parts.
__device__ __forceinline__ Stretch stretch_of(const PeerCall& c, int piece, int w, int part, int64_t begin,
                                              int64_t end) {
  const int j = int(w * c.part_reciprocal >> 32);  // w / part_stretches
  Stretch x;
  x.tile = tile_of(c, piece, j);
  x.first =
      c.chunk_begin + x.tile * c.tile_elements + ((part - j) * c.part_stretches + w) * int64_t(c.stretch_elements);
  x.lo = max(x.first, begin);
  x.hi = min(min(x.first + c.stretch_elements, end), c.chunk_end);
  return x;
}

struct Worker {  // one warp of `count` that share the work
  int index, count;
};

// 16 aligned bytes of the caller's shard.
__device__ inline uint4 load_private(const char* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}
// The same at any address, of which every 4-byte word holds a wanted byte.
__device__ inline uint4 load_any_address(const char* p) {
  const int shift = int(reinterpret_cast<uintptr_t>(p) & 3);
  const uint32_t* w = reinterpret_cast<const uint32_t*>(p - shift);
  uint32_t a[5];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = __ldg(w + i);
  a[4] = shift ? __ldg(w + 4) : 0;
  return {__funnelshift_r(a[0], a[1], shift * 8), __funnelshift_r(a[1], a[2], shift * 8),
          __funnelshift_r(a[2], a[3], shift * 8), __funnelshift_r(a[3], a[4], shift * 8)};
}

// 16 aligned bytes of memory that another GPU, or another block, has written during this launch.
__device__ inline uint4 load_peer(const char* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ inline char load_peer_byte(const char* p) {
  uint32_t v;
  asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return char(v);
}

__device__ inline void store_any(char* p, uint4 v) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
  if (address % 16 == 0) {
    *reinterpret_cast<uint4*>(p) = v;
  } else if (address % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) reinterpret_cast<uint32_t*>(p)[i] = w[i];
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) p[i] = char(w[i / 4] >> (i % 4 * 8));
  }
}

// `count` bytes, whole vectors, between aligned addresses, by one warp of `worker.count`.
template <bool kPeer>
__device__ __forceinline__ void copy_whole(char* to, const char* from, int count, Worker worker) {
  constexpr int kLoads = 8, kStep = 32 * 16;
  const int stride = worker.count * kStep;  // warps side by side: short ranges occupy them all
#pragma unroll 1
  for (int at = worker.index * kStep + lane_index() * 16; at < count; at += kLoads * stride) {
    uint4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (at + u * stride < count)
        v[u] = kPeer ? load_peer(from + at + u * stride) : load_private(from + at + u * stride);
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (at + u * stride < count) *reinterpret_cast<uint4*>(to + at + u * stride) = v[u];
  }
}

// Any bytes [lo, hi) between origins. kPeer: the source is aligned as the indices are. Else the destination is, and the
// 16 bytes around lo and hi are filled up with zeros.
template <bool kPeer>
static __device__ __noinline__ void copy_odd(char* to, const char* from, int64_t lo, int64_t hi, Worker worker) {
  const int lane = lane_index();
  const int64_t first = (lo + 15) & ~int64_t(15), last = hi & ~int64_t(15);
  if (worker.index == 0 && (first != lo || last != hi)) {
    const int64_t i = (lane < 16 ? first - 16 : last) + lane % 16;
    const bool valid = lo <= i && i < hi;
    const bool edge = lane < 16 ? first != lo : last != hi && last >= first;
    if (edge && valid) to[i] = kPeer ? load_peer_byte(from + i) : from[i];
    if (edge && !valid && !kPeer) to[i] = 0;
  }
  for (int64_t at = first + (worker.index * 32 + lane) * 16; at < last; at += worker.count * 32 * 16)
    store_any(to + at, kPeer ? load_peer(from + at) : load_any_address(from + at));
}

// Bytes [lo, hi) from one origin to another; kPeer: they may lie on another GPU.
template <bool kPeer>
__device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t lo, int64_t hi, Worker worker) {
  const uint64_t odd = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | lo | hi;
  if (odd % 16 == 0)
    copy_whole<kPeer>(to + lo, from + lo, int(hi - lo), worker);
  else
    copy_odd<kPeer>(to, from, lo, hi, worker);
}

// Copies the block's tiles of one piece to staging. True if there was anything to copy (the same for every warp).
__device__ __forceinline__ bool copy_piece(const PeerCall& c, int parity, int piece, Worker worker) {
  bool copied = false;
  char* staging = c.base[c.process] + c.staging_at + parity * c.staging_bytes;
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) {
    const HeldRow& h = c.held[i];
    if (h.copied_begin == h.copied_end) continue;
#pragma unroll 1
    for (int j = 0; j < c.tiles_per_piece; ++j) {
      const Range tile = tile_range(c, tile_of(c, piece, j));
      const Range part = clip(tile, h.copied_begin, h.copied_end);
      if (part.begin == part.end) continue;
      copied = true;
      copy_bytes<false>(staging + h.staged_origin, h.origin, part.begin * c.in_bytes, part.end * c.in_bytes, worker);
    }
  }
  return copied;
}

}  // namespace shardsum
