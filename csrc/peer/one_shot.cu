// A sum or a movement in one round: rows are copied to staging, from where peers read them, or written to their
// readers' staging. Protocol: docs/engineering/peer.md.
//
// kFold: sums go on from accumulators that came from other hosts. Rows are read once, as they come, and the result is
// written once, rounded or, in the accumulator's dtype, to be carried on.
#include <cuda_runtime.h>

#include "block.cuh"
#include "sum.cuh"
#include "write.cuh"

namespace shardsum {

constexpr int kSignalWarp = 0, kWaitWarp = 1, kTicketWarp = 2;  // readers' roles between first copy and first read

__device__ inline void producer_barrier(int warps) { asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory"); }

// ---- row flags, by one warp ---------------------------------------------------------------------------------------
__device__ __forceinline__ void await_rows(const PeerCall& c, Shared& s) {
  const int parity = parity_of(s.epoch);
#pragma unroll 1
  for (int r = lane_index(); r < c.num_ranks; r += 32) {
    const RowFlag* flag = row_flag(c, c.process, parity, blockIdx.x, r);
    const int owner = c.owner[r], place = c.place[r];
    const bool near = owner == c.process && c.held[place].direct;
    const int64_t staged = c.staging_at + parity * c.staging_bytes + c.slot[r] * c.row_bytes;
    RowFlag came;
    if (!await_row(c, s, owner, flag, came)) continue;
    const Range range = chunk_range(c, uint32_t(came.start), uint32_t(came.length));
    const char* origin = near
                             ? c.held[place].origin
                             : c.base[c.write ? c.process : owner] + staged - (range.begin * c.in_bytes & ~int64_t(15));
    s.rows[r] = {origin, range, near};
  }
}

// ---- pieces -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void produce_rest(const PeerCall& c, const Shared& s) {
#pragma unroll 1
  for (int piece = 1; piece < c.num_pieces; ++piece) {
    const bool copied = copy_piece(c, parity_of(s.epoch), piece, {warp_index(), c.producer_warps});
    if (!copied && piece + 1 < c.num_pieces) continue;
    producer_barrier(c.producer_warps);
    if (warp_index() == 0) send_stage(c, s, &StageFlag::staged, piece + 1);
  }
}

// What a reader does in a pass over the stretches.
enum Which { kNear, kFar, kBoth };  // those of near rows only (or none), which wait for nobody; the others

// Sums one stretch into output q, onto the accumulators of which `before` are those of earlier outputs where kFold.
// `known`: how many pieces the warp knows to be staged everywhere. False: the group has failed.
template <bool kFold>
__device__ __forceinline__ bool sum_one(const PeerCall& c, Shared& s, WarpSpace& space, int q, int64_t before,
                                        int piece, int w, Which which, uint32_t& known) {
  Segment& segment = space.segment;
  const PeerOutput& output = c.outputs[q];
  const int64_t begin = output.begin * c.width;
  const Stretch x = stretch_of(c, piece, w, 0, begin, output.end * c.width);
  if (x.lo >= x.hi) return true;
  if (x.lo < segment.lo || x.hi > segment.hi) find_segment(s, c.num_ranks, x.lo, x.hi, segment);
  if (which != kBoth && segment.near != (which == kNear)) return true;
  if (!segment.near && !await_stage(c, s, &StageFlag::staged, piece + 1, known)) return false;
  char* origin = static_cast<char*>(output.data) - begin * c.out_bytes;
  const Work work{x.first, int(x.lo - x.first), int(x.hi - x.first)};
  run_stretch<kFold>(c, s, space, work, origin + x.first * c.out_bytes, before - begin);
  return true;
}

// Stretches are dealt to the warps in turn, across pieces: none waits for another. Of several pieces, near rows (and
// zeros) come first, while the others are under way.
template <bool kFold>
__device__ __forceinline__ void read(const PeerCall& c, Shared& s, WarpSpace& space, Worker worker) {
  uint32_t staged = !c.write;  // the flags of rows that are read came with their first piece
  if (lane_index() == 0) space.segment.lo = space.segment.hi = 0;
  __syncwarp();
  const int per_piece = c.tiles_per_piece * c.part_stretches, passes = c.num_pieces > 1 ? 2 : 1;
#pragma unroll 1
  for (int pass = 0; pass < passes; ++pass) {
    const Which which = passes == 1 ? kBoth : pass == 0 ? kNear : kFar;
    int piece = 0, w = worker.index;
#pragma unroll 1
    while (true) {
      for (; w >= per_piece; w -= per_piece) ++piece;
      if (piece >= c.num_pieces) break;
      bool alive = true;
      int64_t before = 0;
#pragma unroll 1
      for (int q = 0; q < c.num_outputs && alive; ++q) {
        alive = sum_one<kFold>(c, s, space, q, before, piece, w, which, staged);
        if constexpr (kFold) before += int64_t(c.outputs[q].end - c.outputs[q].begin) * c.width;
      }
      if (!alive) piece = c.num_pieces;
      w += worker.count;
    }
  }
}

// By all warps: the first piece of what peers read of this process goes to staging, and rows are announced.
__device__ __forceinline__ void stage_and_announce(const PeerCall& c, const Shared& s, int warp, int warps) {
#if SHARDSUM_PEER_MUTANT == 2
  if (warp == kSignalWarp) fence_system(), send_rows(c, s);
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 7);
#endif
  copy_piece(c, parity_of(s.epoch), 0, {warp, warps});
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 1);
  if (warp == kSignalWarp) {
    fence_system();
    if (blockIdx.x == 0) send_began(c, s);
#if SHARDSUM_PEER_MUTANT != 2
    send_rows(c, s);
#endif
  } else if (warp == kTicketWarp && lane_index() == 0) {
    take_ticket(c, s);
  }
}

// The whole of a block's work; `s` and `spaces` are its shared memory.
template <bool kFold>
__device__ __forceinline__ void one_shot_block(const PeerCall& argument, Shared& s, uint4* spaces) {
  const int warp = warp_index(), warps = blockDim.x / 32;
  SHARDSUM_PEER_POINT(0, 6);
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const int writers = c.write ? 1 + c.producer_warps : 0;
  if (warp < writers) {
    if (warp == kAnnounceWarp)
      announce_pieces(c, s);
    else
      write_pieces(c, s);
  } else {
    const int reader = warp - writers, readers = warps - writers;
    if (!c.write) stage_and_announce(c, s, warp, warps);
    if (c.write && reader == kSignalWarp) send_rows(c, s);  // bounds only: each word carries its epoch
    if (reader == kWaitWarp) {
      await_rows(c, s);
      if (!c.write && blockIdx.x == 0) await_began(c, s);
    }
    SHARDSUM_PEER_POINT(s.epoch, 4);
    const bool dead = reader_barrier_or(readers, s.dead);  // the same for all, though a reader may fail at once
    SHARDSUM_PEER_POINT(s.epoch, 2);
    const int producers = !c.write && c.num_pieces > 1 ? c.producer_warps : 0;
    if (!dead && warp < producers) produce_rest(c, s);
    if (!dead && warp >= producers) {
      char* space = reinterpret_cast<char*>(spaces) + warp * warp_space_bytes(c.num_ranks);
      read<kFold>(c, s, *reinterpret_cast<WarpSpace*>(space), {reader - producers, readers - producers});
    }
  }
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 3);
  let_next_begin();
  if (s.dead) fill_invalid(c);
}

namespace {

__global__ void __launch_bounds__(kPeerThreads, 2) peer_one_shot_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  extern __shared__ uint4 spaces[];
  one_shot_block<false>(argument, s, spaces);
}

__global__ void __launch_bounds__(kPeerThreads, 2) peer_fold_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  extern __shared__ uint4 spaces[];
  one_shot_block<true>(argument, s, spaces);
}

}  // namespace

int peer_one_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream) {
  return launch_peer_kernel(peer_one_shot_kernel, call, call.num_threads, warp_spaces, stream);
}

int peer_fold_launch(const PeerCall& call, size_t warp_spaces, void* stream) {
  return launch_peer_kernel(peer_fold_kernel, call, call.num_threads, warp_spaces, stream);
}

}  // namespace shardsum
