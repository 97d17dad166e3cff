// Where rows lie, and copying them: the block's table of sources and rows, the tile map, copies by whole warps.
//
// An "origin" is the address at which flat element 0 would be, so an element's address is origin + index * bytes. The
// staged part of a row starts at the 16-byte boundary of flat indices before its first element and is filled up with
// zeros at both ends: every row is read in whole aligned vectors, whatever its bounds. Rows that are read where the
// caller put them are those whose address and bounds are multiples of 16 bytes as they are.
#pragma once
#include "arith.cuh"
#include "peer_signal.cuh"

namespace shardsum {

constexpr unsigned kFullWarp = 0xffffffffu;

__device__ inline int warp_index() { return threadIdx.x / 32; }
__device__ inline int lane_index() { return threadIdx.x % 32; }

struct Range {
  int64_t begin, end;  // flat elements
};
__device__ inline Range clip(Range a, int64_t begin, int64_t end) {
  a.begin = max(a.begin, begin);
  a.end = max(min(a.end, end), a.begin);
  return a;
}

// A row as this process reads it.
struct PeerRow {
  const char* origin;
  Range range;
};

// A row that this process holds.
struct HeldRow {
  const char* origin;      // of the caller's tensor
  int64_t staged_origin;   // offset from the staging area
  Range copied;            // what goes to staging: the part that others need, or all where `direct` is false
  uint32_t start, length;  // positions
  uint32_t buffer;         // as in RowFlag
  bool direct;             // this process reads the row where it lies
};

struct Shared {
  HeldRow held[kPeerMaxHosted];
  PeerRow rows[kPeerMaxRanks];
  unsigned long long zero_copy;  // bit g: process g has a row that is read where it lies
  uint32_t epoch;
  int dead;
  bool mean, has_scale;
  double scale;
};

// The elements of the chunk that `length` positions from `start` cover.
__device__ inline Range chunk_range(const PeerCall& c, uint32_t start, uint32_t length) {
  return clip({int64_t(start) * c.width, (int64_t(start) + length) * c.width}, c.chunk_begin, c.chunk_end);
}

// Offset from the staging area to the origin of a row whose first element in this chunk is `begin`.
__device__ inline int64_t staged_origin(const PeerCall& c, int parity, int slot, int64_t begin, int64_t bytes) {
  return parity * c.staging_bytes + slot * c.row_bytes - (begin * bytes & ~int64_t(15));
}

__device__ inline uint32_t clamped(const void* values, int i, bool index64, int64_t limit) {
  const int64_t v = index64 ? static_cast<const int64_t*>(values)[i] : static_cast<const int32_t*>(values)[i];
  return uint32_t(min(max(v, int64_t(0)), limit));
}

__device__ __forceinline__ void describe_held(const PeerCall& c, int i, int64_t bytes, HeldRow& h) {
  const PeerSource& source = c.sources[i];
  uint32_t start = source.start, length = source.length;
  if (c.device_lengths != nullptr) {
    start = c.device_starts == nullptr ? 0 : clamped(c.device_starts, i, c.index64, c.size);
    length = clamped(c.device_lengths, i, c.index64, source.capacity);
  }
  length = uint32_t(min(int64_t(length), max(c.size - start, int64_t(0))));
  const Range range = chunk_range(c, start, length);
  const char* origin = static_cast<const char*>(source.data) - start * c.width * bytes;
  const uint64_t misaligned = reinterpret_cast<uint64_t>(origin) | range.begin * bytes | range.end * bytes;
  h.start = start, h.length = length;
  h.origin = origin;
  h.staged_origin = staged_origin(c, 0, i, range.begin, bytes);
  h.direct = misaligned % 16 == 0;
  h.copied = range;
  h.buffer = h.direct ? source.buffer : 0;
  if (h.direct) {
    const int64_t vector = 16 / bytes, begin = source.need_begin * c.width, end = source.need_end * c.width;
    h.copied = clip(range, begin / vector * vector, (end + vector - 1) / vector * vector);
  }
  if (h.buffer != 0) h.copied.end = h.copied.begin;
}

// Row `rank` from the flags of its owner.
__device__ __forceinline__ void describe_row(const PeerCall& c, Shared& s, int rank, int parity, int64_t bytes,
                                             uint32_t length, uint32_t start, uint32_t buffer, uint32_t offset) {
  PeerRow& row = s.rows[rank];
  const int owner = c.owner[rank], slot = c.slot[rank];
  row.range = chunk_range(c, start, length);
  if (owner == c.process && s.held[slot].direct) {
    row.origin = s.held[slot].origin;
  } else if (buffer != 0) {
    row.origin = c.buffers[(buffer - 1) * c.num_processes + owner] + int64_t(offset) * 16 - start * c.width * bytes;
  } else {
    row.origin = c.base[owner] + c.staging_at + staged_origin(c, parity, slot, row.range.begin, bytes);
  }
}

// The tile map. f(lo, hi, tile) for the block's tiles of one piece.
__device__ inline int64_t num_tiles(const PeerCall& c) {
  return (c.chunk_end - c.chunk_begin + c.tile_elements - 1) / c.tile_elements;
}
__device__ inline int num_pieces(const PeerCall& c) {
  const int64_t per_piece = int64_t(c.num_blocks) * c.tiles_per_piece;
  return int((num_tiles(c) + per_piece - 1) / per_piece);
}
__device__ inline int64_t tile_of(const PeerCall& c, int piece, int j) {
  return blockIdx.x + (int64_t(piece) * c.tiles_per_piece + j) * c.num_blocks;
}
__device__ inline Range tile_range(const PeerCall& c, int64_t tile) {
  const int64_t begin = c.chunk_begin + tile * c.tile_elements;
  return clip({begin, begin + c.tile_elements}, c.chunk_begin, c.chunk_end);
}

struct Worker {  // one warp of `count` that share the work
  int index, count;
};

// 16 bytes at any address, of which every 4-byte word holds a wanted byte.
__device__ inline uint4 load_private(const char* p) {
  const int shift = int(reinterpret_cast<uintptr_t>(p) & 3);
  if ((reinterpret_cast<uintptr_t>(p) & 15) == 0) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
  }
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

// Bytes [lo, hi) from one origin to another by one warp of `worker.count`.
// kPeer: the source is aligned as the indices are and may lie on another GPU. Else the destination is; the 16 bytes
// around lo and hi are filled up with zeros.
template <bool kPeer>
__device__ __noinline__ void copy_bytes(char* to, const char* from, int64_t lo, int64_t hi, Worker worker) {
  constexpr int kLoads = 8;
  constexpr int64_t kStep = 32 * 16;
  const int lane = lane_index();
  const int64_t first = (lo + 15) & ~int64_t(15), last = hi & ~int64_t(15);
  if (worker.index == 0 && (first != lo || last != hi)) {
    const int64_t i = (lane < 16 ? first - 16 : last) + lane % 16;
    const bool valid = lo <= i && i < hi;
    const bool edge = lane < 16 ? first != lo : last != hi && last >= first;
    if (edge && valid) to[i] = kPeer ? load_peer_byte(from + i) : from[i];
    if (edge && !valid && !kPeer) to[i] = 0;
  }
  const int64_t stride = worker.count * kStep;  // warps side by side: short ranges occupy them all
  for (int64_t at = first + worker.index * kStep + lane * 16; at < last; at += kLoads * stride) {
    const char* p = from + at;
    char* q = to + at;
    const int count = int(min((last - at + stride - 1) / stride, int64_t(kLoads)));
    uint4 v[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (u < count) v[u] = kPeer ? load_peer(p + u * stride) : load_private(p + u * stride);
#pragma unroll
    for (int u = 0; u < kLoads; ++u)
      if (u < count) store_any(q + u * stride, v[u]);
  }
}

// Copies the block's tiles of one piece to staging. True if there was anything to copy (the same for every warp).
__device__ __forceinline__ bool copy_piece(const PeerCall& c, const Shared& s, int piece, int64_t bytes,
                                           Worker worker) {
  bool copied = false;
  char* staging = c.base[c.process] + c.staging_at + parity_of(s.epoch) * c.staging_bytes;
  for (int i = 0; i < c.num_sources; ++i) {
    const HeldRow& h = s.held[i];
    for (int j = 0; j < c.tiles_per_piece; ++j) {
      const Range tile = tile_range(c, tile_of(c, piece, j));
      const Range part = clip(h.copied, tile.begin, tile.end);
      if (part.begin == part.end) continue;
      copied = true;
      copy_bytes<false>(staging + h.staged_origin, h.origin, part.begin * bytes, part.end * bytes, worker);
    }
  }
  return copied;
}

}  // namespace shardsum
