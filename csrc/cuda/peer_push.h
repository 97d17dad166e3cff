// Small sums over peer memory by pushing (peer_push.cu).
#pragma once
#include "../peer.h"

namespace shardsum {

// One launch of a prepared call whose rows fit the inboxes. Returns a cudaError_t as int.
int peer_push_launch(const PeerCall& call, void* stream);

}  // namespace shardsum
