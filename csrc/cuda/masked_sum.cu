// Launcher of the masked sum.
#include "launch.h"
#include "masked_sum.cuh"

namespace shardsum {

int sum_masked_cuda(const SumArgs& a, const void* data, int64_t row_stride, const Mask& mask, void*,
                    void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  const int64_t total = a.size * a.width;
  if (total == 0) return 0;
  const int64_t vec = vector_elements(a.in_dtype), bytes = element_size(a.in_dtype);
  MaskedParams p{};
  p.epilogue = make_epilogue(a);
  p.data = static_cast<const char*>(data);
  p.row_bytes = row_stride * bytes;
  p.mask = mask;
  p.num_rows = int(a.num_rows);
  p.size = a.size;
  p.width = a.width;
  p.aligned = is_multiple(data, vec * bytes) && row_stride % vec == 0;
  p.mask_words = is_multiple(mask.data, 4) && mask.stride % 4 == 0;
  const int64_t parts = (a.width / vec + 31) / 32;
  const bool columns =
      p.aligned && a.width % vec == 0 && a.width >= 32 * vec && is_multiple(a.out, 16) && a.size * parts < INT32_MAX;
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto kernel, int64_t items, int per_block) -> int {
      kernel<<<unsigned((items + per_block - 1) / per_block), kMaskedThreads, 0, stream>>>(p);
      return cudaGetLastError();
    };
    if constexpr (accumulates_in_float_v<T>) {
      if (columns) {
        p.vectors_per_position = int(a.width / vec);
        p.columns_per_position = int(parts);
        p.num_columns = unsigned(a.size * parts);
        return launch(a.num_rows <= 32 ? masked_columns_kernel<T, uint32_t> : masked_columns_kernel<T, uint64_t>,
                      p.num_columns, kMaskedWarps * kColumns);
      }
    }
    return launch(masked_vectors_kernel<T>, (total + vec - 1) / vec, kMaskedThreads);
  });
}

}  // namespace shardsum
