// Which instruction set's kernels run.
#include <cstdlib>
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

// The request can only lower the choice.
Isa chosen_isa() {
  static const Isa isa = [] {
    const Isa best = best_isa();
    const char* wanted = std::getenv("SHARDSUM_CPU_ISA");
    for (int i = 0; wanted && i < static_cast<int>(best); ++i) {
      if (std::strcmp(wanted, kNames[i]) == 0) return static_cast<Isa>(i);
    }
    return best;
  }();
  return isa;
}

}  // namespace

CpuKernels select_kernels(DType in, DType out) {
#ifdef __x86_64__
  if (chosen_isa() == Isa::kAvx512) return avx512::kernels(in, out);
  if (chosen_isa() == Isa::kAvx2) return avx2::kernels(in, out);
#endif
  return baseline::kernels(in, out);
}

}  // namespace shardsum

extern "C" __attribute__((visibility("default"), used)) const char* shardsum_cpu_isa() {
  return shardsum::kNames[static_cast<int>(shardsum::chosen_isa())];
}
