// A sum that starts at +0.0, or a movement, in one round.
#include <cuda_runtime.h>

#include "one_shot.cuh"

namespace shardsum {
namespace {

__global__ void __launch_bounds__(kPeerThreads, 2) peer_one_shot_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  extern __shared__ uint4 spaces[];
  one_shot_block<false>(argument, s, spaces);
}

}  // namespace

int peer_one_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream) {
  return launch_peer_kernel(peer_one_shot_kernel, call, call.num_threads, warp_spaces, stream);
}

}  // namespace shardsum
