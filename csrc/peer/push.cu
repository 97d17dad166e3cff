// A small sum in one launch: every process pushes its rows into its peers' inboxes and sums what arrives
// (words.cuh). The rows' bounds come in words with an epoch, the flags of block 0. Beside all this the launch is
// settled: every process releases that it has begun it, and ends it when all have (docs/engineering/peer.md).
#include <cuda_runtime.h>

#include "words.cuh"

namespace shardsum {
namespace {

constexpr int kPushWarps = 6;  // the warps after them exchange bounds, and settle the launch
constexpr int kBoundsWarp = kPushWarps, kSettleWarp = kPushWarps + 1;
constexpr int kPushThreads = (kPushWarps + 2) * 32;

// Groups are dealt to the blocks, then to their warps.
__device__ __forceinline__ int64_t first_group() { return int64_t(warp_index()) * gridDim.x + blockIdx.x; }
__device__ __forceinline__ int64_t group_step() { return int64_t(gridDim.x) * kPushWarps; }

template <bool kFloats>
__device__ __forceinline__ void push_groups(const PeerCall& c, const Shared& s) {
#pragma unroll 1
  for (int i = 0; i < c.num_sources; ++i) {
    const Range range = pushed_part(c, i);
#pragma unroll 1
    for (int64_t g = first_group(); g < num_groups<kFloats>(c); g += group_step())
      push_group<kFloats>(c, parity_of(s.epoch), i, range, group_of<kFloats>(c, g));
  }
}

template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_groups(const PeerCall& c, Shared& s) {
  constexpr bool kFloats = is_float_v<T>;
#pragma unroll 1
  for (int64_t g = first_group(); g < num_groups<kFloats>(c); g += group_step())
    if (!sum_group<T, Out, kOut>(c, s, group_of<kFloats>(c, g))) return;
}

template <typename T, typename Out, DType kOut>
__global__ void __launch_bounds__(kPushThreads, 2) peer_push_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  SHARDSUM_PEER_POINT(0, 6);
  const PeerCall& c = s.call;
  if (set_up(argument, s)) return leave(c, s);
  SHARDSUM_PEER_POINT(s.epoch, 0);
  const int warp = warp_index();
  if (warp < kPushWarps) {
    push_groups<is_float_v<T>>(c, s);
  } else if (warp == kBoundsWarp) {
    if (blockIdx.x == 0) send_rows(c, s);
    await_bounds(c, s);
  } else if (blockIdx.x == 0) {
    fence_system();
    send_began(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 1);
  const bool dead = __syncthreads_or(s.dead);
  SHARDSUM_PEER_POINT(s.epoch, 2);
  if (warp == kSettleWarp) {
    if (blockIdx.x == 0 && !dead) await_began(c, s);
    if (lane_index() == 0) take_ticket(c, s);
  } else if (warp < kPushWarps && !dead) {
    sum_groups<T, Out, kOut>(c, s);
  }
  SHARDSUM_PEER_POINT(s.epoch, 3);
  const bool invalid = __syncthreads_or(s.dead);
  let_next_begin();
  if (invalid) fill_invalid(c);
}

}  // namespace

int peer_push_launch(const PeerCall& call, void* stream) {
  switch (call.kind) {
#define SHARDSUM_LAUNCH(index, T, Out, in, out)                                                       \
  case index:                                                                                         \
    if constexpr (sizeof(T) > 1)                                                                      \
      return launch_peer_kernel(peer_push_kernel<T, Out, DType::out>, call, kPushThreads, 0, stream); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_LAUNCH)
#undef SHARDSUM_LAUNCH
  }
  return cudaErrorInvalidValue;
}

}  // namespace shardsum
