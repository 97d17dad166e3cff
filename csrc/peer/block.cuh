// What every kernel over peer memory does at its beginning and end, and its signals and waits.
#pragma once
#include <cuda_runtime.h>

#include "rows.cuh"

namespace shardsum {

constexpr int kPeerThreads = 256;

struct Shared {
  PeerCall call;
  PeerRow rows[kPeerMaxRanks];
  Range far, wanted;  // streaming: the hulls of peers' rows, and of this process's outputs
  uint32_t epoch;
  int dead;
  int progress[kPeerThreads / 32];  // pieces that each producer warp has written
};

// A launch may begin while the kernel before it still runs (PeerCall::overlaps): nothing that one did, or waited for,
// may be relied on before this.
__device__ __forceinline__ void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// By a block that waits for no peer any more: once all have come here the next launch may begin.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Brings the call and the epoch to shared memory; true (for the whole block) if the group has failed. The call's own
// address space is a constant cache, cold at every launch, that fetches one line at a time: here its lines come at
// once.
__device__ __forceinline__ bool set_up(const PeerCall& argument, Shared& s) {
  constexpr int kPieces = sizeof(PeerCall) / sizeof(uint4), kLoads = (kPieces + 95) / 96;  // blocks have 96 threads
  static_assert(sizeof(PeerCall) % sizeof(uint4) == 0);
  const bool looks = threadIdx.x == 32;
  const uint4* from;
  asm volatile("mov.u64 %0, %1;" : "=l"(from) : "l"(&argument));  // a generic address: not through that cache
  uint4 pieces[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (int(threadIdx.x + i * blockDim.x) < kPieces) pieces[i] = from[threadIdx.x + i * blockDim.x];
  await_previous_kernel();
  uint64_t word = 0, aborted = 0;  // {epoch, failed}
  if (looks) {
    word = load_flag(reinterpret_cast<const uint64_t*>(argument.control));
    aborted = load_flag(argument.own_abort);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i)
    if (int(threadIdx.x + i * blockDim.x) < kPieces)
      reinterpret_cast<uint4*>(&s.call)[threadIdx.x + i * blockDim.x] = pieces[i];
  bool failed = false;
  if (looks) {
    failed = (word >> 32) != 0 || aborted != 0;
    s.epoch = uint32_t(word) + 1;
    s.dead = failed;
  }
  if (threadIdx.x < kPeerThreads / 32) s.progress[threadIdx.x] = 0;
  failed = __syncthreads_or(failed);
  if (failed || s.call.device_lengths == nullptr) return failed;
  if (threadIdx.x < s.call.num_sources) describe_from_device(s.call, threadIdx.x, s.call.held[threadIdx.x]);
  __syncthreads();
  return false;
}

// One launch. With call.overlaps its blocks start while the kernel before it ends: see await_previous_kernel.
template <typename Kernel>
cudaError_t launch_peer_kernel(Kernel* kernel, const PeerCall& call, int threads, size_t shared_bytes, void* stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(call.num_blocks), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute, config.numAttrs = call.overlaps;
  void* arguments[] = {const_cast<PeerCall*>(&call)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

// A barrier of the warps that read; whether it is true for any of them.
__device__ inline bool reader_barrier_or(int warps, bool mine) {
  int any;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.s32 p, %2, 0;\n\tbarrier.cta.red.or.pred q, 2, %1, p;\n\t"
      "selp.s32 %0, 1, 0, q;\n\t}"
      : "=r"(any)
      : "r"(warps * 32), "r"(int(mine))
      : "memory");
  return any != 0;
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

// By one warp, of block 0 alone and after a fence: this process has begun the launch, hence ended the one before.
__device__ __forceinline__ void send_began(const PeerCall& c, const Shared& s) {
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32) store_flag(began_word(c, g, c.process), s.epoch);
}

// By one warp: every process has begun the launch (it may have begun the next one). On failure, s.dead is set.
__device__ __forceinline__ void await_began(const PeerCall& c, Shared& s) {
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32)
    await(c, g, s.epoch, &s.dead,
          [&] { return int32_t(uint32_t(acquire_flag(began_word(c, c.process, g))) - s.epoch) >= 0; });
  __syncwarp();
}

// By one warp: the flags of this process's rows, for this block of every process.
__device__ __forceinline__ void send_rows(const PeerCall& c, const Shared& s) {
  const int parity = parity_of(s.epoch);
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32) {
#pragma unroll 1
    for (int i = 0; i < c.num_sources; ++i) {
      RowFlag* flag = row_flag(c, g, parity, blockIdx.x, c.sources[i].rank);
      const HeldRow& h = c.held[i];
      store_flags(&flag->number, flag_word(s.epoch, c.number), flag_word(s.epoch, c.signature));
      store_flags(&flag->length, flag_word(s.epoch, h.length), flag_word(s.epoch, h.start));
    }
  }
}

// One lane waits for the flag of a row of `owner`, which must be in the same call. False: the group has failed.
__device__ __forceinline__ bool await_row(const PeerCall& c, Shared& s, int owner, const RowFlag* flag, RowFlag& came) {
  const bool alive = await(c, owner, s.epoch, &s.dead, [&] {
    load_flags(&flag->number, came.number, came.signature);
    acquire_flags(&flag->length, came.length, came.start);
    return is_of(came.length, s.epoch) && is_of(came.start, s.epoch) && is_of(came.number, s.epoch) &&
           is_of(came.signature, s.epoch);
  });
#if SHARDSUM_PEER_MUTANT != 5  // stress test only: nobody looks at the call that a row is of
  if (alive && (uint32_t(came.number) != c.number || uint32_t(came.signature) != c.signature)) {
    give_up(c, kPeerDiffers, owner, blockIdx.x, s.epoch, c.process, uint32_t(came.number), uint32_t(came.signature));
    s.dead = 1;
    return false;
  }
#endif
  return alive;
}

// By one warp: this block of this process has come to `value`.
__device__ inline void send_stage(const PeerCall& c, const Shared& s, uint64_t StageFlag::* word, uint32_t value) {
  fence_system();
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32)
    store_flag(&(stage_flag(c, g, parity_of(s.epoch), c.process)->*word), flag_word(s.epoch, value));
}

// By one warp: every process has come to at least `value`; `known` is the least that this warp has seen. False: the
// group has failed.
__device__ inline bool await_stage(const PeerCall& c, Shared& s, uint64_t StageFlag::* word, uint32_t value,
                                   uint32_t& known) {
  if (known >= value) return true;
  uint32_t least = 0xffffffffu;
  bool all = true;
#pragma unroll 1
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
  all = __all_sync(kFullWarp, all);
  __syncwarp();  // what a lane has acquired, all may read
  return all;
}

// By one warp: the least that any process has come to, as far as is known here.
__device__ inline uint32_t look_at_stage(const PeerCall& c, const Shared& s, uint64_t StageFlag::* word) {
  uint32_t least = 0xffffffffu;
#pragma unroll 1
  for (int g = lane_index(); g < c.num_processes; g += 32) {
    const uint64_t seen = acquire_flag(&(stage_flag(c, c.process, parity_of(s.epoch), g)->*word));
    least = min(least, is_of(seen, s.epoch) ? uint32_t(seen) : 0);
  }
  least = __reduce_min_sync(kFullWarp, least);
  __syncwarp();  // what a lane has acquired, all may read
  return least;
}

// The block's tiles of every output: NaN in every float dtype, -1 in int64. A streamed sum is dealt to the blocks from
// where its rows begin, not by tiles: whichever block has not done its share fills everything. Headers become invalid.
static __device__ __noinline__ void fill_invalid(const PeerCall& c) {
  const bool all = c.push && c.producer_warps > 0;
  const int64_t first = all ? 0 : blockIdx.x, step = all ? 1 : c.num_blocks;
  if (threadIdx.x < kPeerHeaders && c.headers[threadIdx.x] != nullptr)
    c.headers[threadIdx.x][0] = c.headers[threadIdx.x][1] = -1;
  for (int q = 0; q < c.num_outputs; ++q) {
    char* out = static_cast<char*>(c.outputs[q].data);
    const int64_t begin = c.outputs[q].begin * c.width, end = c.outputs[q].end * c.width;
    for (int64_t tile = first; tile < num_tiles(c); tile += step) {
      const Range part = clip(tile_range(c, tile), begin, end);
      const int64_t last = (part.end - begin) * c.out_bytes;
      for (int64_t i = (part.begin - begin) * c.out_bytes + threadIdx.x; i < last; i += blockDim.x) out[i] = char(0xff);
    }
  }
}

// What a launch of a failed group does: no waiting, no reading.
static __device__ __noinline__ void leave(const PeerCall& c, const Shared& s) {
  if (threadIdx.x == 0) {
    peer_gave_up(c);
    take_ticket(c, s);
  }
  fill_invalid(c);
}

}  // namespace shardsum
