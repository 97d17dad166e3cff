// Launcher of the masked sum.
#include <algorithm>

#include "launch.h"
#include "masked_sum.cuh"

namespace shardsum {

int sum_masked_cuda(const SumArgs& a, const void* data, int64_t row_stride, const Mask& mask, void*, void* stream) {
  const int64_t total = a.size * a.width;
  if (total == 0) return 0;
  int num_sms = 0;
  if (const cudaError_t e = count_sms(&num_sms)) return e;
  const int64_t vec = vector_elements(a.in_dtype), bytes = dtype_bytes(a.in_dtype);
  MaskedParams p{};
  p.epilogue = make_epilogue(a);
  p.data = static_cast<const char*>(data);
  p.row_bytes = row_stride * bytes;
  p.mask = mask;
  p.num_rows = a.num_rows;
  p.size = a.size;
  p.width = a.width;
  p.num_vectors = (total + vec - 1) / vec;
  const int64_t max_blocks = int64_t(num_sms) * kMaskedBlocksPerSM;
  const bool whole = a.width % vec == 0 && is_multiple(data, vec * bytes) && row_stride % vec == 0 && is_multiple(a.out, 16);
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (accumulates_in_float_v<T>) {
      if (whole) {
        p.vectors_per_position = a.width / vec;
        const int64_t columns = (p.num_vectors + 31) / 32;
        p.tile_cols = columns >= 4 * max_blocks * kMaskedWarps ? 4 : 1;
        p.num_tiles = (columns + p.tile_cols - 1) / p.tile_cols;
        const int64_t blocks = std::min((p.num_tiles + kMaskedWarps - 1) / kMaskedWarps, max_blocks);
        masked_vectors_kernel<T><<<unsigned(blocks), kMaskedThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
        return cudaGetLastError();
      }
    }
    const int64_t blocks = std::min((p.num_vectors + kMaskedThreads - 1) / kMaskedThreads, 2 * max_blocks);
    masked_elements_kernel<T><<<unsigned(blocks), kMaskedThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace shardsum
