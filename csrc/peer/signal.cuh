// Memory order between GPUs, and waiting with a deadline.
//
// Pattern: data is written, the block meets at a barrier (or, piece by piece, the writing warp publishes a counter in
// shared memory), lanes of one warp fence at system scope and store relaxed flags into every peer's memory (release:
// the fence is cumulative over the barrier). A peer's lane loads the flag with acquire, its warp or block meets at a
// barrier, and reads the data with relaxed system-scope loads, which no stale L1 line can serve. Flags carry the epoch
// of their launch and are compared for equality. Rows that are pushed need none of this (words.cuh).
#pragma once
#include <cstdint>

#include "call.h"

namespace shardsum {

__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline void store_flag(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ inline void store_flags(uint64_t* p, uint64_t a, uint64_t b) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ inline uint64_t load_flag(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint64_t acquire_flag(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void load_flags(const uint64_t* p, uint64_t& a, uint64_t& b) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}
__device__ inline void acquire_flags(const uint64_t* p, uint64_t& a, uint64_t& b) {
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
}

__device__ inline uint64_t flag_word(uint32_t epoch, uint32_t value) { return (uint64_t(epoch) << 32) | value; }
__device__ inline bool is_of(uint64_t word, uint32_t epoch) {
#if SHARDSUM_PEER_MUTANT == 3  // stress test only: a flag of the launch before last passes
  return uint32_t(word >> 32) == epoch || uint32_t(word >> 32) == epoch - 2;
#else
  return uint32_t(word >> 32) == epoch;
#endif
}

// Where the stress test delays a block at random (nothing elsewhere).
#ifndef SHARDSUM_PEER_POINT
#define SHARDSUM_PEER_POINT(epoch, point)
#endif

__device__ inline int parity_of(uint32_t epoch) {
#if SHARDSUM_PEER_MUTANT == 1
  return 0;
#else
  return epoch & 1;
#endif
}

__device__ inline RowFlag* row_flag(const PeerCall& c, int process, int parity, int block, int rank) {
  return reinterpret_cast<RowFlag*>(c.base[process]) + (int64_t(parity * c.max_blocks + block) * c.flag_ranks + rank);
}
__device__ inline StageFlag* stage_flag(const PeerCall& c, int process, int parity, int from) {
  return reinterpret_cast<StageFlag*>(c.base[process] + c.stages_at) +
         (int64_t(parity * c.max_blocks + int(blockIdx.x)) * c.num_processes + from);
}
__device__ inline uint64_t* abort_word(const PeerCall& c, int process) {
  return reinterpret_cast<uint64_t*>(c.base[process] + c.abort_at);
}

// The last launch that process `from` has begun, as `process` knows it.
__device__ inline uint64_t* began_word(const PeerCall& c, int process, int from) {
  return abort_word(c, process) + 1 + from;
}

__device__ inline uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// {1, kind - 1, reporter, process, block, epoch}
__device__ inline uint64_t encode_abort(int kind, int reporter, int process, int block, uint32_t epoch) {
  return (uint64_t(1) << 63) | (uint64_t(kind - 1) << 62) | (uint64_t(reporter) << 48) | (uint64_t(process) << 40) |
         (uint64_t(block) << 32) | epoch;
}

// Ends the group: the first to come records why, in host memory, and tells every peer. The last two: the call that
// `process` is in, where this process found out that it is another one.
static __device__ __noinline__ void give_up(const PeerCall& c, int kind, int process, int block, uint32_t epoch,
                                            int reporter, uint32_t number = 0, uint32_t signature = 0) {
  if (atomicCAS(&c.control->failed, 0u, 1u) != 0) return;
  volatile PeerFailure* f = c.failure;
  f->process = process;
  f->block = block;
  f->epoch = epoch;
  f->reporter = reporter;
  f->number = c.number, f->signature = c.signature;
  f->their_number = number, f->their_signature = signature;
  fence_system();
  f->kind = kind;
  for (int g = 0; g < c.num_processes; ++g)
    if (g != c.process) store_flag(abort_word(c, g), encode_abort(kind, reporter, process, block, epoch));
}

// Records a peer's abort, if there is one.
__device__ inline bool peer_gave_up(const PeerCall& c) {
  const uint64_t word = load_flag(abort_word(c, c.process));
  if (word == 0) return false;
  give_up(c, 1 + (int(word >> 62) & 1), int(word >> 40) & 0xff, int(word >> 32) & 0xff, uint32_t(word),
          int(word >> 48) & 0x7f);
  return true;
}

// One look, now and then, at whether a wait for `process` since `since` is over.
static __device__ __noinline__ bool wait_is_over(const PeerCall& c, int process, uint32_t epoch, volatile int* dead,
                                                 uint64_t& since) {
  if (*dead) return true;
  const uint64_t now = now_ns();
  if (since == 0) since = now;
  const bool expired = int64_t(now - since) > c.timeout_ns;
  if (expired) give_up(c, kPeerAbsent, process, blockIdx.x, epoch, c.process);
  if (!expired && !*static_cast<volatile uint32_t*>(&c.control->failed) && !peer_gave_up(c)) return false;
  *dead = 1;
  return true;
}

// Spins until ready() holds. False: the group has failed, or `process` did not come in time, which fails it.
template <typename Ready>
__device__ inline bool await(const PeerCall& c, int process, uint32_t epoch, volatile int* dead, Ready&& ready) {
  uint64_t since = 0;
  for (uint32_t spin = 1; !ready(); ++spin) {
    if (spin % 128 != 0) continue;
    if (wait_is_over(c, process, epoch, dead, since)) return false;
    if (spin > 4096) __nanosleep(200);
  }
  return true;
}

}  // namespace shardsum
