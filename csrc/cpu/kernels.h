// The inner kernels of the CPU path, compiled once for each instruction set (kernels.cpp) and chosen at run time.
#pragma once
#include <cstdint>

#include "../row_table.h"

namespace shardsum {

// `count` elements that the same rows cover: rows[k] points at the first of them in the k-th of these rows.
using SpanKernel = void (*)(const void* const* rows, int64_t num_rows, void* out, int64_t count, const Finish& finish);

// Up to 64 positions of width 1: bit i of words[r] says whether data[r * row_stride + i] contributes.
using MaskedKernel = void (*)(const void* data, int64_t row_stride, int64_t num_rows, const uint64_t* words, void* out,
                              int64_t count, const Finish& finish);

struct CpuKernels {
  SpanKernel span;
  MaskedKernel masked;
};

namespace baseline {
CpuKernels kernels(DType in, DType out);
}
#ifdef __x86_64__
namespace avx2 {
CpuKernels kernels(DType in, DType out);
}
namespace avx512 {
CpuKernels kernels(DType in, DType out);
}
#endif

}  // namespace shardsum
