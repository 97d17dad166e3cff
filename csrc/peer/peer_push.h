// Sums over peer memory by pushing: small ones (peer_push.cu), large ones of floats (peer_stream.cu).
#pragma once
#include "peer.h"

namespace shardsum {

// One launch of a prepared call whose chunk fits the inboxes. Returns a cudaError_t as int.
int peer_push_launch(const PeerCall& call, void* stream);
int peer_stream_launch(const PeerCall& call, void* stream);

}  // namespace shardsum
