// Launcher of the masked sum.
#include "launch.h"
#include "masked_columns.cuh"
#include "masked_vectors.cuh"

namespace shardsum {
namespace {

// How many columns a warp takes: enough to read kMasks masks at once, few enough for the last warps not to be late.
void shape_columns(MaskedParams& p, int64_t num_vectors, int64_t vectors_per_position) {
  p.num_vectors = unsigned(num_vectors);
  p.vectors_per_position = unsigned(vectors_per_position);
  while (int64_t(2) << p.division_shift < vectors_per_position) ++p.division_shift;
  p.division = unsigned((uint64_t(1) << (32 + p.division_shift)) / vectors_per_position + 1);  // exact for v < 2^31
  p.columns = p.num_rows <= 16 ? 4 : p.num_rows <= 32 ? 2 : 1;
  p.wide = p.columns > 1 && vectors_per_position % (32 * p.columns) == 0;
  if (p.wide || p.columns == 1) {
    p.row_shift = 30;
    p.num_masks = p.num_rows;
  } else {
    while (1 << p.row_shift < p.num_rows) ++p.row_shift;
    p.num_masks = p.columns << p.row_shift;
  }
  p.row_mask = (1 << p.row_shift) - 1;
  p.mask_bytes = p.mask.bits ? p.mask.stride * 4 : p.mask.stride;
  p.mask_shift = p.mask.bits ? 3 : 0;
  p.mask_low = p.mask.bits ? 7 : 0;
  p.mask_which = p.mask.bits ? 1 : 0xff;
}

template <typename Kernel>
int launch_columns(Kernel kernel, const MaskedParams& p, cudaStream_t stream) {
  const unsigned per_block = 32 * p.columns * kColumnWarps;
  return launch(kernel, (p.num_vectors + per_block - 1) / per_block, kColumnWarps * 32, stream, p);
}

}  // namespace

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
  const bool columns =
      p.aligned && a.width % vec == 0 && a.width >= 32 * vec && is_multiple(a.out, 16) && total / vec < INT32_MAX;
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (accumulates_in_float_v<T>) {
      if (columns) {
        shape_columns(p, total / vec, a.width / vec);
        return p.epilogue.direct ? launch_columns(masked_columns_kernel<T, true>, p, stream)
                                 : launch_columns(masked_columns_kernel<T, false>, p, stream);
      }
    }
    const int64_t per_block = kMaskedThreads * vec;
    return launch(masked_vectors_kernel<T>, (total + per_block - 1) / per_block, kMaskedThreads, stream, p);
  });
}

}  // namespace shardsum
