// Rows that are written into their readers' staging, piece by piece: some warps write, one announces what is done.
#pragma once
#include "block.cuh"

namespace shardsum {

constexpr int kAnnounceWarp = 0;  // the warps after it are the producers

// Copies the block's tiles of one piece of this process's rows to every peer, as far as peers read them; and, where a
// row is not read where the caller put it, to this process's own staging.
__device__ __forceinline__ void write_piece(const PeerCall& c, int parity, int piece, Worker worker) {
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) {
    const HeldRow& h = c.held[i];
    const Range row = chunk_range(c, h.start, h.length), needed = needed_part(c, c.sources[i].rank, row);
#pragma unroll 1
    for (int j = 0; j < c.tiles_per_piece; ++j) {
      const Range tile = tile_range(c, tile_of(c, piece, j));
#pragma unroll 1
      for (int k = h.direct; k < c.num_processes; ++k) {  // the peers after this process, round robin
        const int g = c.process + k < c.num_processes ? c.process + k : c.process + k - c.num_processes;
        const Range part = clip(tile, k == 0 ? row.begin : needed.begin, k == 0 ? row.end : needed.end);
        if (part.begin == part.end || (k > 0 && is_inside(c, c.peer_gap, part.begin, part.end))) continue;
        char* staging = c.base[g] + c.staging_at + parity * c.staging_bytes;
        copy_bytes<false>(staging + h.staged_origin, h.origin, part.begin * c.in_bytes, part.end * c.in_bytes, worker);
      }
    }
  }
}

__device__ inline void publish(int* progress, int value) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(unsigned(__cvta_generic_to_shared(progress))), "r"(value)
               : "memory");
}
__device__ inline int observe(const int* progress) {
  int value;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
               : "=r"(value)
               : "r"(unsigned(__cvta_generic_to_shared(progress)))
               : "memory");
  return value;
}

// By each producer warp.
__device__ __forceinline__ void write_pieces(const PeerCall& c, Shared& s) {
  const int producer = warp_index() - kAnnounceWarp - 1;
#pragma unroll 1
  for (int piece = 0; piece < c.num_pieces; ++piece) {
    write_piece(c, parity_of(s.epoch), piece, {producer, c.producer_warps});
    __syncwarp();
    if (lane_index() == 0) publish(&s.progress[producer], piece + 1);
  }
}

// By one warp: tells every process how many pieces have been written by all producers; then settles the launch.
__device__ __forceinline__ void announce_pieces(const PeerCall& c, Shared& s) {
  const int producer = min(lane_index(), c.producer_warps - 1);
#pragma unroll 1
  for (int announced = 0; announced < c.num_pieces;) {
#if SHARDSUM_PEER_MUTANT == 2
    const int done = c.num_pieces;
#else
    const int done = __reduce_min_sync(kFullWarp, observe(&s.progress[producer]));
#endif
    if (done == announced) {
      __nanosleep(20);
      continue;
    }
    __syncwarp();  // what a lane has observed, all announce
    send_stage(c, s, &StageFlag::staged, done);
    announced = done;
  }
  if (blockIdx.x == 0) {
    send_began(c, s);
    await_began(c, s);
  }
  if (lane_index() == 0) take_ticket(c, s);
}

}  // namespace shardsum
