// Small host helpers shared by the launchers.
#pragma once
#include <cuda_runtime.h>

#include "arith.cuh"

namespace shardsum {

inline int64_t vector_elements(DType t) { return element_size(t) > 1 ? 16 / element_size(t) : 8; }

inline bool is_multiple(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// Nothing but the sum, in the rows' own dtype.
inline bool is_plain(const SumArgs& a) {
  return a.in_dtype == a.out_dtype && a.carry == nullptr &&
         !(a.finish.mean || a.finish.has_scale || a.finish.accumulate);
}

// For a launch whose output begins at element `first`. `workspace` holds accumulators, then counts (mean only).
inline Epilogue make_epilogue(const SumArgs& a, int64_t first = 0, void* workspace = nullptr) {
  Epilogue e{};
  e.out = static_cast<char*>(a.out) + first * element_size(a.out_dtype);
  e.out_dtype = a.out_dtype;
  e.mean = a.finish.mean;
  e.has_scale = a.finish.has_scale;
  e.accumulate = a.finish.accumulate;
  e.scale = a.finish.scale;
  const int64_t acc_bytes = accumulator_size(a.in_dtype);
  if (a.carry != nullptr) e.start = static_cast<const char*>(a.carry) + first * acc_bytes;
  e.carried = a.finish.carried;
  e.plain = !(e.mean || e.has_scale || e.accumulate);
  e.direct = is_plain(a);
  if (workspace != nullptr) {
    e.carry = static_cast<char*>(workspace) + first * acc_bytes;
    if (e.mean)
      e.carry_count = reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + a.size * a.width * acc_bytes) + first;
  }
  return e;
}

// What <<<>>> does, in one call of the runtime. Returns a cudaError_t.
template <typename Params>
int launch(void (*kernel)(Params), int64_t blocks, int threads, cudaStream_t stream, const Params& params) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(blocks)), config.blockDim = dim3(threads), config.stream = stream;
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), arguments);
}

inline cudaError_t count_sms(int* num_sms) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  return cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace shardsum
