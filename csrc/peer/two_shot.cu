// An all_reduce in two rounds and one launch: every process writes to each peer that one's part of its rows, sums its
// own part and writes the sums to all peers, which copy them to their outputs. Everything that a process reads is in
// its own memory. Protocol: docs/engineering/peer.md.
#include <cuda_runtime.h>

#include "parts.cuh"
#include "write.cuh"

namespace shardsum {
namespace {

// Warp 0 announces; the last one awaits the rows' bounds while all between them write the first piece. Then the first
// of these write the others, if there are any, and all the rest, the last one included, are summers. Results are copied
// by whichever has nothing else to do.
struct TwoShot : Shared {
  int summed[kPeerThreads / 32];  // pieces that each summer has done its share of
  int next_copy;                  // the first stretch of results that no warp has taken
};

__device__ __forceinline__ int num_producers(const PeerCall& c, int warps) {
  return c.num_pieces > 1 ? min(c.producer_warps, warps - 2) : 0;
}

__device__ inline void publish_warp(int* progress, int value) {
  __syncwarp();
  if (lane_index() == 0) publish(&progress[warp_index()], value);
}

// The least of a table's values from warp `first` up to `last`: they are `all` once all have been reached.
__device__ __forceinline__ int least(const int* progress, int first, int last, int all) {
  const bool mine = lane_index() >= first && lane_index() < last;
  return __reduce_min_sync(kFullWarp, mine ? observe(&progress[lane_index()]) : all);
}

// By one warp: sends the rows' bounds; tells every process how many pieces have been written to it, and of how many the
// sums have; then settles the launch.
__device__ __forceinline__ void announce(const PeerCall& c, TwoShot& s, int warps) {
  send_rows(c, s);  // no data is vouched for: each word carries its epoch
  const int producers = num_producers(c, warps), all = c.num_pieces, parity = parity_of(s.epoch);
  int staged = 0, reduced = 0;
  bool begun = blockIdx.x != 0;
#pragma unroll 1
  while (staged < all || reduced < all) {
    if (__any_sync(kFullWarp, *static_cast<volatile int*>(&s.dead))) break;  // a summer that gave up has no more to say
#if SHARDSUM_PEER_MUTANT == 2
    const int written = all;
#else
    // Those that write the first piece alone count as done with the others.
    const int written = least(s.progress, 1, warps - 1, all);
#endif
#if SHARDSUM_PEER_MUTANT == 6  // stress test only: sums are announced before they are written
    const int summed = written;
#else
    const int summed = least(s.summed, 1 + producers, warps, all);
#endif
    if (written == staged && summed == reduced) {
      __nanosleep(20);
      continue;
    }
    __syncwarp();  // what a lane has observed, all announce
    SHARDSUM_PEER_POINT(s.epoch, 4);
    fence_system();
#pragma unroll 1
    for (int g = lane_index(); g < c.num_processes; g += 32) {
      StageFlag* flag = stage_flag(c, g, parity, c.process);
      if (written != staged) store_flag(&flag->staged, flag_word(s.epoch, written));
      if (summed != reduced) store_flag(&flag->reduced, flag_word(s.epoch, summed));
    }
    if (!begun) send_began(c, s);
    begun = true;
    staged = written, reduced = summed;
  }
  if (blockIdx.x == 0) await_began(c, s);
  if (lane_index() == 0) take_ticket(c, s);
}

// By each warp between the first and the last.
__device__ __forceinline__ void write_first_piece(const PeerCall& c, TwoShot& s, int warps) {
  write_parts(c, parity_of(s.epoch), 0, {warp_index() - 1, warps - 2});
  publish_warp(s.progress, warp_index() <= num_producers(c, warps) ? 1 : c.num_pieces);
}
__device__ __forceinline__ void write_rest(const PeerCall& c, TwoShot& s, int producers) {
#pragma unroll 1
  for (int piece = 1; piece < c.num_pieces; ++piece) {
    SHARDSUM_PEER_POINT(s.epoch, 7);
    write_parts(c, parity_of(s.epoch), piece, {warp_index() - 1, producers});
    publish_warp(s.progress, piece + 1);
  }
}

// This warp's share of one piece of this process's part. False: the group has failed.
__device__ __forceinline__ bool sum_piece(const PeerCall& c, TwoShot& s, WarpSpace& space, int piece, Worker worker,
                                          int& w, uint32_t& staged) {
  const int stretches = c.tiles_per_piece * c.part_stretches;
#pragma unroll 1
  for (; w < stretches; w += worker.count) {
    const Stretch x = stretch_of(c, piece, w, c.process, 0, c.chunk_end);
    if (x.lo >= x.hi || is_zero(c, s, space, x)) continue;
    if (!space.segment.near && !await_stage(c, s, &StageFlag::staged, piece + 1, staged)) return false;
    sum_part(c, s, space, x);
  }
  w -= stretches;
  return true;
}

// Takes the next stretch of results, if it is one of the first `limit`.
__device__ __forceinline__ bool take_copy(TwoShot& s, int limit, int& ticket) {
  if (lane_index() == 0) {
    ticket = *static_cast<volatile int*>(&s.next_copy);
    while (ticket < limit) {
      const int seen = atomicCAS(&s.next_copy, ticket, ticket + 1);
      if (seen == ticket) break;
      ticket = seen;
    }
  }
  ticket = __shfl_sync(kFullWarp, ticket, 0);
  return ticket < limit;
}

// By every warp that has nothing else left to do.
__device__ __forceinline__ void copy_rest(const PeerCall& c, TwoShot& s, WarpSpace& space, uint32_t reduced) {
  const int per_piece = copies_per_piece(c);
  int ticket;
#pragma unroll 1
  while (take_copy(s, c.num_pieces * per_piece, ticket)) {
    if (!await_stage(c, s, &StageFlag::reduced, ticket / per_piece + 1, reduced)) return;
    copy_results(c, s, space, ticket);
  }
}

// By each summer. No warp waits for sums of others before it has done all of its own: they may wait for those.
__device__ __forceinline__ void sum_and_copy(const PeerCall& c, TwoShot& s, WarpSpace& space, Worker worker) {
  fill_unreached(c, s, space, worker);
  const int per_piece = copies_per_piece(c), share = (per_piece + worker.count - 1) / worker.count;
  uint32_t staged = 0, reduced = 0;
  int w = worker.index, ticket;
#pragma unroll 1
  for (int piece = 0; piece < c.num_pieces; ++piece) {
    if (!sum_piece(c, s, space, piece, worker, w, staged)) return;
    SHARDSUM_PEER_POINT(s.epoch, 5);
    publish_warp(s.summed, piece + 1);
    if (__any_sync(kFullWarp, *static_cast<volatile int*>(&s.next_copy) >= int(reduced) * per_piece))
      reduced = look_at_stage(c, s, &StageFlag::reduced);
#pragma unroll 1
    for (int i = 0; i < share && take_copy(s, int(reduced) * per_piece, ticket); ++i) copy_results(c, s, space, ticket);
  }
  copy_rest(c, s, space, reduced);
}

__global__ void __launch_bounds__(kPeerThreads, 2) peer_two_shot_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ TwoShot s;
  extern __shared__ uint4 spaces[];
  const int warp = warp_index(), warps = blockDim.x / 32;
  SHARDSUM_PEER_POINT(0, 6);
  if (threadIdx.x < kPeerThreads / 32) s.summed[threadIdx.x] = 0;
  if (threadIdx.x == 0) s.next_copy = 0;
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const int producers = num_producers(c, warps), summer = warp - 1 - producers, summers = warps - 1 - producers;
  if (warp == 0) {
    announce(c, s, warps);
  } else {
    if (warp + 1 < warps)
      write_first_piece(c, s, warps);
    else
      await_parts(c, s);
    SHARDSUM_PEER_POINT(s.epoch, 1);
    WarpSpace& space =
        *reinterpret_cast<WarpSpace*>(reinterpret_cast<char*>(spaces) + warp * warp_space_bytes(c.num_ranks));
    if (lane_index() == 0) space.segment.lo = space.segment.hi = 0;
    __syncwarp();
    if (summer < 0) {
      write_rest(c, s, producers);
      copy_rest(c, s, space, 0);  // sums of all peers have come by then, hence all rows' bounds
    } else if (!reader_barrier_or(summers, s.dead)) {
      SHARDSUM_PEER_POINT(s.epoch, 2);
      sum_and_copy(c, s, space, {summer, summers});
    }
  }
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 3);
  let_next_begin();
  if (s.dead) fill_invalid(c);
}

}  // namespace

int peer_two_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream) {
  return launch_peer_kernel(peer_two_shot_kernel, call, call.num_threads, warp_spaces, stream);
}

}  // namespace shardsum
