// Sums in two rounds over peer memory (peer_two_shot.cu).
#pragma once
#include <cstddef>

#include "peer.h"

namespace shardsum {

// One launch of a prepared call in two rounds, with so many bytes of shared memory for its warps. Returns a cudaError_t
// as int.
int peer_two_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream);

}  // namespace shardsum
