// Sharing work out to the intra-op threads of torch, and the stack tables that the shares use.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstdint>

namespace shardsum {

constexpr int64_t kBytesPerTask = 256 << 10;   // less takes 6 us, hardly more than waking a thread, and never waits
constexpr int64_t kStreamingBytes = 16 << 20;  // an output of this size is in no cache when it is read again

// How many threads to use for work that moves `bytes`.
inline int64_t num_tasks(int64_t bytes) {
  if (bytes < 2 * kBytesPerTask) return 1;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return std::min<int64_t>(threads, bytes / kBytesPerTask);
}

// body(task) for task = 0, 1, ..., tasks - 1, at the same time where there are threads.
template <class Body>
void run_tasks(int64_t tasks, const Body& body) {
  if (tasks == 1) return body(0);
  auto run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t task = begin; task < end; ++task) (*static_cast<const Body*>(context))(task);
  };
  torch_parallel_for(0, tasks, 1, run, const_cast<Body*>(&body));
}

}  // namespace shardsum
