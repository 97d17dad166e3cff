// A call over peer memory as Python describes it: words of 64 bits, in the order in which `read_plan` takes them. They
// say everything about the call but its tensors and the bounds of its rows.
#pragma once
#include "../check.h"
#include "call.h"

namespace shardsum {

constexpr int64_t kPlanVersion = 6;

struct Plan {
  PeerCall call{};
  PeerHost* host;
  bool warm;  // a call of this plan has run before
  int64_t chunk_elements;
};

inline double as_double(int64_t bits) {
  double value;
  static_assert(sizeof(value) == sizeof(bits));
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

// Words has int64_t take(), take(T&) and take_pointer(T&).
template <class Words>
void read_shape(Words& w, PeerCall& c) {
  int64_t dtype = 0;
  w.take(dtype), c.in_dtype = static_cast<DType>(dtype);
  w.take(dtype), c.out_dtype = static_cast<DType>(dtype);
  w.take(c.in_bytes), w.take(c.out_bytes);
  w.take(c.move), w.take(c.two_shot), w.take(c.push), w.take(c.write), w.take(c.mean), w.take(c.has_scale);
  c.scale = as_double(w.take());
  w.take(c.size), w.take(c.width);
  w.take(c.peer_gap.begin), w.take(c.peer_gap.end), w.take(c.own_gap.begin), w.take(c.own_gap.end);
}

template <class Words>
void read_tiles(Words& w, PeerCall& c) {
  w.take(c.tile_elements), w.take(c.stretch_elements), w.take(c.stretches_per_tile), w.take(c.warp_columns);
  w.take(c.tiles_per_piece), w.take(c.num_blocks), w.take(c.max_blocks), w.take(c.num_threads);
  w.take(c.producer_warps);
}

template <class Words>
void read_memory(Words& w, PeerCall& c) {
  w.take(c.stages_at), w.take(c.abort_at), w.take(c.staging_at), w.take(c.reduced_at);
  w.take(c.staging_bytes), w.take(c.row_bytes), w.take(c.reduced_bytes);
  w.take_pointer(c.control), w.take_pointer(c.failure);
  w.take(c.timeout_ns);
}

template <class Words>
void read_members(Words& w, PeerCall& c) {
  w.take(c.flag_ranks), w.take(c.num_ranks), w.take(c.num_processes), w.take(c.process), w.take(c.num_sources);
  w.take(c.num_outputs);
  SHARDSUM_CHECK(c.num_ranks <= kPeerMaxRanks && c.num_processes <= kPeerMaxRanks, "too many ranks");
  SHARDSUM_CHECK(c.num_sources <= kPeerMaxHosted && c.num_outputs <= kPeerMaxHosted, "too many rows");
  for (int g = 0; g < c.num_processes; ++g) w.take_pointer(c.base[g]);
  for (int r = 0; r < c.num_ranks; ++r) {
    w.take(c.owner[r]), w.take(c.place[r]), w.take(c.slot[r]);
    w.take(c.need_begin[r]), w.take(c.need_end[r]);
  }
  for (int i = 0; i < c.num_sources; ++i) w.take(c.sources[i].rank);
  for (int q = 0; q < c.num_outputs; ++q) w.take(c.outputs[q].begin), w.take(c.outputs[q].end);
}

template <class Words>
Plan read_plan(Words& w) {
  Plan plan;
  SHARDSUM_CHECK(w.take() == kPlanVersion, "this plan is of another version of the library");
  w.take(plan.warm);
  w.take_pointer(plan.host);
  w.take(plan.chunk_elements);
  w.take(plan.call.signature);
  read_shape(w, plan.call);
  read_tiles(w, plan.call);
  read_memory(w, plan.call);
  read_members(w, plan.call);
  return plan;
}

}  // namespace shardsum
