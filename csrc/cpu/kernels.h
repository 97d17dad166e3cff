// The inner kernels of the CPU path, compiled once for each instruction set (kernels.cpp) and chosen at run time.
#pragma once
#include <stdint.h>

#include "../row_table.h"

namespace shardsum {

// `count` elements that the same rows cover: rows[k] points at the first of them in the k-th of these rows.
// carry: the first of the accumulators at which the sums start, or null.
// stream: the output is too large to be found in a cache later; write around the caches where the processor can.
using SpanKernel = void (*)(const void* const* rows, int64_t num_rows, const void* carry, void* out, int64_t count,
                            const Finish& finish, bool stream);

// Elements [first, first + count) of the output, at most kBlockElements of them, row after row. carry and out point at
// element 0.
using BlockKernel = void (*)(const Row* rows, int64_t num_rows, const void* carry, void* out, int64_t first,
                             int64_t count, const Finish& finish);
constexpr int64_t kBlockElements = 512;

// Up to 64 positions of width 1: bit i of words[r] says whether data[r * row_stride + i] contributes to position i.
struct MaskedPositions {
  const void* data;
  int64_t row_stride;
  int64_t num_rows;
  const uint64_t* words;
  int64_t count;
};
using MaskedKernel = void (*)(const MaskedPositions& positions, void* out, const Finish& finish);

struct CpuKernels {
  SpanKernel span;
  BlockKernel block;
  MaskedKernel masked;
  uint64_t (*pack)(const uint8_t* bytes, int64_t count);  // bit i: byte i, of at most 64, is not 0
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

// Those of the best instruction set of this processor.
CpuKernels select_kernels(DType in, DType out);

}  // namespace shardsum
