// Compares the headers of messages on the device, and spoils the results of an exchange whose processes are out of step.
#include "../headers.h"
#include "launch.h"

namespace shardsum {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBytesPerBlock = 1 << 20;  // of results: they are written in the rare case alone
constexpr int64_t kMostBlocks = 64;

__device__ int64_t load_word(const uint8_t* at) {
  uint64_t word = 0;
  for (int i = 7; i >= 0; --i) word = word << 8 | at[i];
  return int64_t(word);
}

// Every block compares all headers: there are few, and blocks need not wait for each other. One that finds the header
// already overwritten by another block comes to the same result.
__global__ void __launch_bounds__(kThreads) check_headers_kernel(const __grid_constant__ HeaderCheck c) {
  __shared__ int first;
  if (threadIdx.x == 0) first = kMaxHeaders;
  __syncthreads();
  const volatile int64_t* header = c.header;
  const int64_t low = header[0], high = header[1];
  for (int i = threadIdx.x; i < c.num_headers; i += kThreads) {
    const uint8_t* at = c.received + c.offsets[i];
    if (load_word(at) != low || load_word(at + 8) != high) atomicMin(&first, i);
  }
  const bool bad = __syncthreads_or(low < 0 || high < 0) != 0 || first < kMaxHeaders;
  if (!bad) return;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    volatile int64_t* record = c.record;
    if (first < kMaxHeaders && record[0] == 0) {
      record[1] = c.processes[first];
      record[2] = load_word(c.received + c.offsets[first]);
      record[3] = low;
      __threadfence_system();
      record[0] = 1;
    }
    c.state[0] = c.state[1] = -1;
    c.header[0] = c.header[1] = -1;
  }
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int o = 0; o < c.num_spoiled; ++o)
    for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < c.spoiled[o].bytes; i += step)
      c.spoiled[o].data[i] = 255;
}

}  // namespace

int check_headers_cuda(const HeaderCheck& check, void* cuda_stream) {
  int64_t bytes = 0;
  for (int o = 0; o < check.num_spoiled; ++o) bytes += check.spoiled[o].bytes;
  int64_t blocks = (bytes + kBytesPerBlock - 1) / kBytesPerBlock;
  blocks = blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks;
  return launch(check_headers_kernel, blocks, kThreads, static_cast<cudaStream_t>(cuda_stream), check);
}

}  // namespace shardsum
