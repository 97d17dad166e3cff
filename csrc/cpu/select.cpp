// Which instruction set's kernels run.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace shardsum {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

constexpr const char* kNames[] = {"baseline", "avx2", "avx512"};

Isa best_isa() {
#ifdef __x86_64__
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

std::atomic<Isa>& isa_in_use() {
  static std::atomic<Isa> isa{best_isa()};
  return isa;
}

}  // namespace

CpuKernels select_kernels(DType in, DType out) {
#ifdef __x86_64__
  const Isa isa = isa_in_use().load(std::memory_order_relaxed);
  if (isa == Isa::kAvx512) return avx512::kernels(in, out);
  if (isa == Isa::kAvx2) return avx2::kernels(in, out);
#endif
  return baseline::kernels(in, out);
}

}  // namespace shardsum

// Use at most the named instruction set (null: the best); returns the name of the one in use from then on.
extern "C" __attribute__((visibility("default"), used)) const char* shardsum_limit_cpu_isa(const char* name) {
  using namespace shardsum;
  Isa isa = best_isa();
  for (int i = 0; name && i < 3; ++i) {
    if (std::strcmp(name, kNames[i]) == 0) isa = std::min(isa, static_cast<Isa>(i));
  }
  isa_in_use().store(isa);
  return kNames[static_cast<int>(isa)];
}
