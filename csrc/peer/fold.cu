// A sum that goes on from accumulators which came from other hosts, in one round: rows are read once, as they come, and
// the result is written once, rounded or, in the accumulator's dtype, to be carried on.
#include <cuda_runtime.h>

#include "one_shot.cuh"

namespace shardsum {
namespace {

__global__ void __launch_bounds__(kPeerThreads, 2) peer_fold_kernel(const __grid_constant__ PeerCall argument) {
  __shared__ Shared s;
  extern __shared__ uint4 spaces[];
  one_shot_block<true>(argument, s, spaces);
}

}  // namespace

int peer_fold_launch(const PeerCall& call, size_t warp_spaces, void* stream) {
  return launch_peer_kernel(peer_fold_kernel, call, call.num_threads, warp_spaces, stream);
}

}  // namespace shardsum
