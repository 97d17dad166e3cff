// One launch of a prepared call, by the kernel that its way takes. Each returns a cudaError_t as int.
#pragma once
#include <cstddef>

#include "call.h"

namespace shardsum {

// warp_spaces: bytes of shared memory for all warps of a block (sum.cuh).
int peer_one_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream);  // one_shot.cu
int peer_fold_launch(const PeerCall& call, size_t warp_spaces, void* stream);      // fold.cu
int peer_two_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream);  // two_shot.cu
// The chunk fits the inboxes.
int peer_push_launch(const PeerCall& call, void* stream);    // push.cu
int peer_stream_launch(const PeerCall& call, void* stream);  // stream.cu

}  // namespace shardsum
