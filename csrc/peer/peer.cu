// One collective in one launch: copy in, signal, wait, sum (or move) over peer memory. Protocol: docs/peer.md.
#include <cuda_runtime.h>

#include <atomic>

#include "peer_block.cuh"
#include "peer_push.h"
#include "peer_sum.cuh"
#include "peer_two_shot.h"
#include "peer_write.cuh"

namespace shardsum {
namespace {

constexpr int kSignalWarp = 0, kWaitWarp = 1, kTicketWarp = 2;  // readers' roles between first copy and first read

__device__ inline void producer_barrier(int warps) { asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory"); }

// ---- row flags, by one warp
// ------------------------------------------------------------------------------------------
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
    const uint32_t start = uint32_t(came.start), buffer = uint32_t(came.buffer);
    const Range range = chunk_range(c, start, uint32_t(came.length));
    const char* origin = near
                             ? c.held[place].origin
                             : c.base[c.write ? c.process : owner] + staged - (range.begin * c.in_bytes & ~int64_t(15));
    if (buffer != 0) {
      if (!near)
        origin = c.buffers[(buffer - 1) * c.num_processes + owner] + int64_t(uint32_t(came.offset)) * 16 -
                 start * c.width * c.in_bytes;
      atomicOr(&s.zero_copy, 1ull << owner);
    }
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

// Sums one stretch into output q. `known`: how many pieces the warp knows to be staged everywhere. False: the group has
// failed.
__device__ __forceinline__ bool sum_one(const PeerCall& c, Shared& s, WarpSpace& space, int q, int piece, int w,
                                        Which which, uint32_t& known) {
  Segment& segment = space.segment;
  const PeerOutput& output = c.outputs[q];
  const int64_t begin = output.begin * c.width;
  const Stretch x = stretch_of(c, piece, w, 0, begin, output.end * c.width);
  if (x.lo >= x.hi) return true;
  if (x.lo < segment.lo || x.hi > segment.hi) find_segment(s, c.num_ranks, x.lo, x.hi, segment);
  if (which != kBoth && segment.near != (which == kNear)) return true;
  if (!segment.near && !await_stage(c, s, &StageFlag::staged, piece + 1, known)) return false;
  char* origin = static_cast<char*>(output.data) - begin * c.out_bytes;
  run_stretch(c, s, space, {x.first, int(x.lo - x.first), int(x.hi - x.first)}, origin + x.first * c.out_bytes);
  return true;
}

// Stretches are dealt to the warps in turn, across pieces: none waits for another. Of several pieces, near rows (and
// zeros) come first, while the others are under way.
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
#pragma unroll 1
      for (int q = 0; q < c.num_outputs && alive; ++q) alive = sum_one(c, s, space, q, piece, w, which, staged);
      if (!alive) piece = c.num_pieces;
      w += worker.count;
    }
  }
}

// ---- the end ------------------------------------------------------------------------------------------------------
// Rows that were read where they lie may be written again once this launch has ended on their owner.
__device__ __forceinline__ void release_zero_copy(const PeerCall& c, Shared& s) {
#if SHARDSUM_PEER_MUTANT == 5
  return;
#endif
  if (s.zero_copy == 0) return;
  if (warp_index() == kSignalWarp) send_stage(c, s, &StageFlag::done, 1);
  uint32_t known = 0;
  if (warp_index() == kWaitWarp && (s.zero_copy >> c.process & 1)) await_stage(c, s, &StageFlag::done, 1, known);
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
    if (!c.stages && c.num_pieces > 1) send_stage(c, s, &StageFlag::staged, c.num_pieces);
  } else if (warp == kTicketWarp && lane_index() == 0) {
    take_ticket(c, s);
  }
}

__global__ void __launch_bounds__(kPeerThreads, 2) peer_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  extern __shared__ uint4 spaces[];
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
    const int producers = !c.write && c.stages && c.num_pieces > 1 ? c.producer_warps : 0;
    if (!dead && warp < producers) produce_rest(c, s);
    if (!dead && warp >= producers) {
      char* space = reinterpret_cast<char*>(spaces) + warp * warp_space_bytes(c.num_ranks);
      read(c, s, *reinterpret_cast<WarpSpace*>(space), {reader - producers, readers - producers});
    }
  }
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 3);
  if (s.zero_copy != 0) {
    if (!s.dead) release_zero_copy(c, s);
    __syncthreads();
  }
  let_next_begin();
  if (s.dead) fill_invalid(c);
}

}  // namespace

int peer_launch(PeerCall& call, void* stream) {
  call.own_abort = reinterpret_cast<const uint64_t*>(call.base[call.process] + call.abort_at);
  call.kind = kind_of(call);
  if (call.kind < 0) return cudaErrorInvalidValue;
  const int64_t per_piece = int64_t(call.num_blocks) * call.tiles_per_piece;
  call.num_pieces = int32_t((num_tiles(call) + per_piece - 1) / per_piece);
  call.part_stretches = call.stretches_per_tile / (call.two_shot ? call.num_processes : 1);
  call.part_reciprocal = ((uint64_t(1) << 32) + call.part_stretches - 1) / call.part_stretches;
  if (call.device_lengths == nullptr)
    for (int i = 0; i < call.num_sources; ++i)
      call.held[i] = describe_held(call, i, call.sources[i].start, call.sources[i].length);
  const size_t spaces = call.num_threads / 32 * warp_space_bytes(call.num_ranks);
  if (call.push) return call.producer_warps > 0 ? peer_stream_launch(call, stream) : peer_push_launch(call, stream);
  if (call.two_shot) return peer_two_shot_launch(call, spaces, stream);
  return launch_peer_kernel(peer_kernel, call, call.num_threads, spaces, stream);
}

// Whether the current GPU can begin a kernel while the one before it in its stream ends.
static bool can_overlap() {
  static std::atomic<int> known[64];  // by device: 0 unknown, 1 no, 2 yes
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  if (known[device] == 0) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    known[device] = major >= 9 ? 2 : 1;
  }
  return known[device] == 2;
}

// Whether all that the next kernel in a captured stream depends on is one kernel.
static bool follows_one_kernel(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges = nullptr;
  if (cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count) != cudaSuccess) return false;
#else
  if (cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count) != cudaSuccess) return false;
#endif
  cudaGraphNodeType type;
  return count == 1 && cudaGraphNodeGetType(nodes[0], &type) == cudaSuccess && type == cudaGraphNodeTypeKernel;
}

// The group's last call outside a capture is over, for what `stream` gets from now on.
static cudaError_t follow_eager_call(PeerHost& host, cudaStream_t stream) {
  if (host.eager_stream == -1 || host.eager_stream == reinterpret_cast<int64_t>(stream)) return cudaSuccess;
  const auto event = reinterpret_cast<cudaEvent_t>(host.eager_event);
  if (host.eager_stream == 0 && !host.eager_records) {
    if (const cudaError_t e = cudaEventRecord(event, nullptr)) return e;
  }
  host.eager_records = 1;
  return cudaStreamWaitEvent(stream, event, 0);
}

// An event takes a tenth of the host's time. As long as all calls come on the default stream it is only recorded when
// one comes on another stream, which then waits for all that the default stream has been given. Other streams may be
// gone by then, or be captured.
static cudaError_t note_eager_call(PeerHost& host, cudaStream_t stream) {
  host.eager_stream = reinterpret_cast<int64_t>(stream);
  if (stream == nullptr && !host.eager_records) return cudaSuccess;
  return cudaEventRecord(reinterpret_cast<cudaEvent_t>(host.eager_event), stream);
}

int peer_enqueue(PeerCall& call, int64_t chunk_elements, bool warm, PeerHost& host, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const auto id_of = reinterpret_cast<int64_t>(stream_handle);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (stream != nullptr) {  // the default stream cannot be captured
    if (const cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture)) return e;
  }
  const bool capturing = status == cudaStreamCaptureStatusActive;
  const auto capture_event = reinterpret_cast<cudaEvent_t>(host.capture_event);
  if (capturing && !warm) return kPeerNotWarm;
  if (!capturing) {
    if (const cudaError_t e = follow_eager_call(host, stream)) return e;
  } else if (host.capture_id == int64_t(capture) && host.capture_stream != id_of) {
    if (const cudaError_t e = cudaStreamWaitEvent(stream, capture_event, 0)) return e;
  }
  const int64_t end = call.size * call.width;
  for (int64_t begin = 0; begin < end; begin += chunk_elements) {
    call.chunk_begin = begin;
    call.chunk_end = begin + chunk_elements < end ? begin + chunk_elements : end;
    call.overlaps = can_overlap() && (!capturing || follows_one_kernel(stream));
    if (const int e = peer_launch(call, stream_handle)) return e;
  }
  if (!capturing) return note_eager_call(host, stream);
  host.capture_id = int64_t(capture), host.capture_stream = id_of;
  return cudaEventRecord(capture_event, stream);
}

}  // namespace shardsum
