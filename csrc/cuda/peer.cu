// One collective in one launch: copy in, signal, wait, sum (or move) over peer memory. Protocol: docs/peer.md.
#include <cuda_runtime.h>

#include "peer_sum.cuh"

namespace shardsum {
namespace {

constexpr int kPeerThreads = 256;
constexpr int kSignalWarp = 0, kWaitWarp = 1, kTicketWarp = 2;  // roles between the first copy and the first read

__device__ inline void producer_barrier(int warps) { asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory"); }
__device__ inline void reader_barrier(int warps) { asm volatile("bar.sync 2, %0;" ::"r"(warps * 32) : "memory"); }

// ---- set-up -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void describe(const PeerCall& c, Shared& s, int64_t bytes) {
  for (int i = threadIdx.x; i < c.num_sources; i += blockDim.x) describe_held(c, i, bytes, s.held[i]);
  if (threadIdx.x == 32) s.epoch = c.control->epoch + 1;
  if (threadIdx.x == 33) {
    s.zero_copy = 0;
    s.mean = c.mean, s.has_scale = c.has_scale, s.scale = c.scale;
  }
  if (threadIdx.x == 64) s.dead = *static_cast<volatile uint32_t*>(&c.control->failed) || peer_gave_up(c);
  __syncthreads();
}

// The last block to have read the epoch advances it; the next launch finds the new one.
__device__ inline void take_ticket(const PeerCall& c, const Shared& s) {
  uint32_t ticket;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(ticket) : "l"(&c.control->ticket) : "memory");
  if (ticket == gridDim.x - 1) {
    c.control->ticket = 0;
    c.control->epoch = s.epoch;
  }
}

// ---- signals and waits, each by one whole warp ----------------------------------------------------------------------
__device__ __forceinline__ void send_rows(const PeerCall& c, const Shared& s) {
  const int parity = parity_of(s.epoch);
  fence_system();
#pragma unroll 1
  for (int k = lane_index(); k < c.num_sources * c.num_processes; k += 32) {
    const int i = k % c.num_sources, g = k / c.num_sources;
    RowFlag* flag = row_flag(c, g, parity, c.sources[i].rank);
    const HeldRow& h = s.held[i];
    store_flags(&flag->buffer, flag_word(s.epoch, h.buffer), flag_word(s.epoch, c.sources[i].offset));
    store_flags(&flag->length, flag_word(s.epoch, h.length), flag_word(s.epoch, h.start));
  }
}

__device__ inline void send_stage(const PeerCall& c, const Shared& s, uint64_t StageFlag::* word, uint32_t value) {
  fence_system();
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32)
    store_flag(&(stage_flag(c, g, parity_of(s.epoch), c.process)->*word), flag_word(s.epoch, value));
}

__device__ __forceinline__ void await_rows(const PeerCall& c, Shared& s, int64_t bytes) {
  const int parity = parity_of(s.epoch);
  for (int r = lane_index(); r < c.num_ranks; r += 32) {
    const RowFlag* flag = row_flag(c, c.process, parity, r);
    uint64_t length, start, buffer, offset;
    const bool came = await(c, c.owner[r], s.epoch, &s.dead, [&] {
      load_flags(&flag->buffer, buffer, offset);
      acquire_flags(&flag->length, length, start);
      return is_of(length, s.epoch) && is_of(start, s.epoch) && is_of(buffer, s.epoch) && is_of(offset, s.epoch);
    });
    if (!came) continue;
    describe_row(c, s, r, parity, bytes, uint32_t(length), uint32_t(start), uint32_t(buffer), uint32_t(offset));
    if (uint32_t(buffer) != 0) atomicOr(&s.zero_copy, 1ull << c.owner[r]);
  }
}

// Every process has come to at least `value`; `known` is the least that this warp has seen.
__device__ inline bool await_stage(const PeerCall& c, Shared& s, uint64_t StageFlag::* word, uint32_t value,
                                   uint32_t& known) {
  if (known >= value) return true;
  uint32_t least = 0xffffffffu;
  bool all = true;
  for (int g = lane_index(); g < c.num_processes; g += 32) {
    const uint64_t* flag = &(stage_flag(c, c.process, parity_of(s.epoch), g)->*word);
    uint64_t seen = 0;
    all &= await(c, g, s.epoch, &s.dead, [&] {
      seen = acquire_flag(flag);
      return is_of(seen, s.epoch) && uint32_t(seen) >= value;
    });
    least = min(least, uint32_t(seen));
  }
  known = __reduce_min_sync(kFullWarp, least);
  return __all_sync(kFullWarp, all);
}

// ---- pieces -------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void produce_rest(const PeerCall& c, const Shared& s, int64_t bytes) {
  const int pieces = num_pieces(c);
  for (int piece = 1; piece < pieces; ++piece) {
    const bool copied = copy_piece(c, s, piece, bytes, {warp_index(), c.producer_warps});
    if (!copied && piece + 1 < pieces) continue;
    producer_barrier(c.producer_warps);
    if (warp_index() == 0) send_stage(c, s, &StageFlag::staged, piece + 1);
  }
}

// What one warp takes at a time: elements [lo, hi) of those from `first` on, in `tile`.
struct Stretch {
  int64_t tile, first, lo, hi;
};

// The w-th stretch of a piece, cut to [begin, end). In a two-shot a tile has one part for each process.
__device__ __forceinline__ Stretch stretch_of(const PeerCall& c, int piece, int w, int part, int parts, int64_t begin,
                                              int64_t end) {
  const int per_part = c.stretches_per_tile / parts;
  Stretch x;
  x.tile = tile_of(c, piece, w / per_part);
  x.first = c.chunk_begin + x.tile * c.tile_elements + int64_t(part * per_part + w % per_part) * c.stretch_elements;
  x.lo = max(x.first, begin);
  x.hi = min(min(x.first + c.stretch_elements, end), c.chunk_end);
  return x;
}

// Where element 0 would be, of the part of `tile` that `process` has summed.
__device__ __forceinline__ char* reduced_origin(const PeerCall& c, const Shared& s, int process, int64_t tile) {
  const int64_t part = c.tile_elements / c.num_processes;
  const int64_t begin = c.chunk_begin + tile * c.tile_elements + process * part;
  return c.base[process] + c.reduced_at + parity_of(s.epoch) * c.reduced_bytes + (tile * part - begin) * c.out_bytes;
}

// Sums this process's part of the piece: into the outputs, or (two-shot) where the others will pull it from.
__device__ __forceinline__ void sum_piece(const PeerCall& c, Shared& s, ActiveRow* list, int piece, Worker worker,
                                          int64_t bytes, uint32_t& known) {
  const int parts = c.two_shot ? c.num_processes : 1, part = c.two_shot ? c.process : 0;
  for (int q = 0; q < c.num_outputs; ++q) {
    const int64_t begin = c.outputs[q].begin * c.width, end = c.outputs[q].end * c.width;
    char* to = static_cast<char*>(c.outputs[q].data) - begin * c.out_bytes;
    for (int w = worker.index; w < c.tiles_per_piece * c.stretches_per_tile / parts; w += worker.count) {
      const Stretch x = stretch_of(c, piece, w, part, parts, begin, end);
      if (x.lo >= x.hi) continue;
      if (!await_stage(c, s, &StageFlag::staged, piece + 1, known)) return;
      char* origin = c.two_shot ? reduced_origin(c, s, c.process, x.tile) : to;
      run_stretch(c, s, list, x.first, int(x.lo - x.first), int(x.hi - x.first), bytes, origin + x.first * c.out_bytes);
    }
  }
}

__device__ __forceinline__ void pull_piece(const PeerCall& c, Shared& s, int piece, Worker worker, uint32_t& known) {
  if (!await_stage(c, s, &StageFlag::reduced, piece + 1, known)) return;
  char* to = static_cast<char*>(c.outputs[0].data);
  for (int k = 0; k < c.num_processes; ++k) {
    const int g = (c.process + k) % c.num_processes;
    for (int w = worker.index; w < c.tiles_per_piece * c.stretches_per_tile / c.num_processes; w += worker.count) {
      const Stretch x = stretch_of(c, piece, w, g, c.num_processes, 0, c.chunk_end);
      if (x.lo >= x.hi) continue;
      copy_bytes<true>(to, reduced_origin(c, s, g, x.tile), x.lo * c.out_bytes, x.hi * c.out_bytes, {0, 1});
    }
  }
}

__device__ __forceinline__ void read(const PeerCall& c, Shared& s, ActiveRow* list, Worker worker, int64_t bytes) {
  uint32_t staged = 1, reduced = 0;  // the rows' own flags came with the first piece
  const int pieces = num_pieces(c);
  for (int piece = 0; piece <= pieces; ++piece) {
    if (piece < pieces) sum_piece(c, s, list, piece, worker, bytes, staged);
    if (!c.two_shot) continue;
    if (piece < pieces) {
      reader_barrier(worker.count);
      if (worker.index == 0 && !s.dead) send_stage(c, s, &StageFlag::reduced, piece + 1);
    }
    if (piece > 0) pull_piece(c, s, piece - 1, worker, reduced);
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

// NaN in every float dtype, -1 in int64.
__device__ __noinline__ void fill_invalid(const PeerCall& c) {
  for (int q = 0; q < c.num_outputs; ++q) {
    char* out = static_cast<char*>(c.outputs[q].data);
    const int64_t begin = c.outputs[q].begin * c.width, end = c.outputs[q].end * c.width;
    for (int64_t tile = blockIdx.x; tile < num_tiles(c); tile += c.num_blocks) {
      const Range part = clip(tile_range(c, tile), begin, end);
      const int64_t last = (part.end - begin) * c.out_bytes;
      for (int64_t i = (part.begin - begin) * c.out_bytes + threadIdx.x; i < last; i += blockDim.x) out[i] = char(0xff);
    }
  }
}

__global__ void __launch_bounds__(kPeerThreads, 2) peer_kernel(const __grid_constant__ PeerCall c) {
  __shared__ Shared s;
  extern __shared__ ActiveRow lists[];
  const int64_t bytes = c.in_bytes;
  const int warp = warp_index(), warps = blockDim.x / 32;
  describe(c, s, bytes);
  if (s.dead) {
    if (threadIdx.x == 0) take_ticket(c, s);
    fill_invalid(c);
    return;
  }
#if SHARDSUM_PEER_MUTANT == 2
  if (warp == kSignalWarp) send_rows(c, s);
  __syncthreads();
#endif
  SHARDSUM_PEER_POINT(s.epoch, 0);
  copy_piece(c, s, 0, bytes, {warp, warps});
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 1);
  const bool produces = c.stages && num_pieces(c) > 1;
  if (warp == kSignalWarp) {
#if SHARDSUM_PEER_MUTANT != 2
    send_rows(c, s);
#endif
    if (!produces && num_pieces(c) > 1) send_stage(c, s, &StageFlag::staged, num_pieces(c));
  } else if (warp == kWaitWarp) {
    await_rows(c, s, bytes);
  } else if (warp == kTicketWarp && lane_index() == 0) {
    take_ticket(c, s);
  }
  const bool dead = __syncthreads_or(s.dead);  // the same for all, though a reader may fail at once
  SHARDSUM_PEER_POINT(s.epoch, 2);
  if (!dead) {
    if (produces && warp < c.producer_warps) {
      produce_rest(c, s, bytes);
    } else {
      const int first = produces ? c.producer_warps : 0;
      read(c, s, lists + warp * (c.num_ranks + kPeerBatch), {warp - first, warps - first}, bytes);
    }
  }
  __syncthreads();
  SHARDSUM_PEER_POINT(s.epoch, 3);
  if (s.zero_copy != 0) {
    if (!s.dead) release_zero_copy(c, s);
    __syncthreads();
  }
  if (s.dead) fill_invalid(c);
}

}  // namespace

int peer_launch(const PeerCall& call, void* stream) {
  const size_t lists = call.num_threads / 32 * (call.num_ranks + kPeerBatch) * sizeof(ActiveRow);
  peer_kernel<<<call.num_blocks, call.num_threads, lists, static_cast<cudaStream_t>(stream)>>>(call);
  return cudaGetLastError();
}

int peer_enqueue(PeerCall& call, int64_t chunk_elements, bool warm, PeerHost& host, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const auto id_of = reinterpret_cast<int64_t>(stream_handle);
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
  if (const cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture)) return e;
  const bool capturing = status == cudaStreamCaptureStatusActive;
  if (capturing && !warm) return kPeerNotWarm;
  const bool follows = capturing ? host.capture_id == int64_t(capture) && host.capture_stream != id_of
                                 : host.eager_stream != -1 && host.eager_stream != id_of;
  const auto event = reinterpret_cast<cudaEvent_t>(capturing ? host.capture_event : host.eager_event);
  if (follows) {
    if (const cudaError_t e = cudaStreamWaitEvent(stream, event, 0)) return e;
  }
  const int64_t end = call.size * call.width;
  for (int64_t begin = 0; begin < end; begin += chunk_elements) {
    call.chunk_begin = begin;
    call.chunk_end = begin + chunk_elements < end ? begin + chunk_elements : end;
    if (const int e = peer_launch(call, stream_handle)) return e;
  }
  if (capturing)
    host.capture_id = int64_t(capture), host.capture_stream = id_of;
  else
    host.eager_stream = id_of;
  return cudaEventRecord(event, stream);
}

}  // namespace shardsum
