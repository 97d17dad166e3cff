// Small host helpers shared by the launchers.
#pragma once
#include <cuda_runtime.h>

#include "arith.cuh"

namespace shardsum {

inline bool accumulates_in_float(DType t) {
  return t == DType::kFloat16 || t == DType::kBFloat16 || t == DType::kFloat32;
}

template <typename T>
constexpr bool accumulates_in_float_v = std::is_same_v<acc_t<T>, float>;

inline int64_t vector_elements(DType t) { return dtype_bytes(t) > 1 ? 16 / dtype_bytes(t) : 8; }

inline bool is_multiple(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline Epilogue make_epilogue(const SumArgs& a) {
  Epilogue e{};
  e.out = a.out;
  e.out_dtype = a.out_dtype;
  e.mean = a.finish.mean;
  e.has_scale = a.finish.has_scale;
  e.accumulate = a.finish.accumulate;
  e.scale = a.finish.scale;
  e.plain = !(e.mean || e.has_scale || e.accumulate);
  return e;
}

inline cudaError_t count_sms(int* num_sms) {
  int device = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  return cudaDeviceGetAttribute(num_sms, cudaDevAttrMultiProcessorCount, device);
}

}  // namespace shardsum
