// Launchers of the ragged sum.
#include <algorithm>

#include "launch.h"
#include "sum_small.cuh"

namespace shardsum {
namespace {

// Up to these many bytes read and written, latency counts and not bandwidth (measured, docs/kernel.md).
constexpr int64_t kFewRowsBytes = 4 << 20, kManyRowsBytes = 2 << 20;
// With few rows, a thread per element up to these many elements, then one per vector.
constexpr int64_t kElementThreads = 1 << 15;

int64_t clip(int64_t value, int64_t last) { return std::min(std::max(value, int64_t(0)), last); }

RowRange clip_row(const Row& row, int64_t first, int64_t count, int64_t unit, int64_t unit_bytes) {
  if (row.begin == row.end) return {nullptr, 0, 0};
  const int64_t begin = row.begin / unit - first, end = row.end / unit - first;
  return {static_cast<const char*>(row.data) - begin * unit_bytes, int(clip(begin, count)), int(clip(end, count))};
}

// f(whole vectors?, plain?) with compile-time booleans; only dtypes that accumulate in float have those kernels.
template <typename T, typename F>
int with_variant(bool aligned, bool plain, F&& f) {
  using std::false_type, std::true_type;
  if constexpr (accumulates_in_float_v<T>) {
    if (aligned) return plain ? f(true_type{}, true_type{}) : f(true_type{}, false_type{});
  }
  return f(false_type{}, false_type{});
}

template <typename T, bool kAligned, bool kPlain, int ROWS>
int launch_few(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  constexpr int kUnit = kAligned ? kVec<T> : 1;
  FewRowsParams<ROWS> p{};
  p.epilogue = make_epilogue(a);
  p.out = a.out;
  p.num_units = int(a.size * a.width / kUnit);
  for (int r = 0; r < a.num_rows; ++r) {
    const RowRange row = clip_row(rows[r], 0, p.num_units, kUnit, kUnit * sizeof(T));
    p.begin[r] = row.begin;
    p.length[r] = row.end - row.begin;
    p.origin[r] = row.origin;
  }
  const int threads = p.num_units <= 32 ? 32 : p.num_units <= 64 ? 64 : 128;
  sum_few_rows_kernel<T, kAligned, kPlain, ROWS><<<(p.num_units + threads - 1) / threads, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T>
int sum_few(const SumArgs& a, const Row* rows, bool aligned, cudaStream_t stream) {
  const bool plain = is_plain(a), few = a.num_rows <= 4;
  if constexpr (accumulates_in_float_v<T>) {
    if (!aligned || a.size * a.width <= kElementThreads) {
      if (plain) return few ? launch_few<T, false, true, 4>(a, rows, stream) : launch_few<T, false, true, 8>(a, rows, stream);
    } else if (plain) {
      return few ? launch_few<T, true, true, 4>(a, rows, stream) : launch_few<T, true, true, 8>(a, rows, stream);
    } else {
      return launch_few<T, true, false, 8>(a, rows, stream);
    }
  }
  return launch_few<T, false, false, 8>(a, rows, stream);
}

template <typename T>
int sum_many(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  RowsParams p;
  p.epilogue = make_epilogue(a);
  p.num_units = int(a.size * a.width);
  p.num_rows = int(a.num_rows);
  for (int r = 0; r < p.num_rows; ++r) p.rows[r] = clip_row(rows[r], 0, p.num_units, 1, sizeof(T));
  sum_many_rows_kernel<T><<<(p.num_units + 31) / 32, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kAligned, bool kPlain>
int launch_tiles(RowsParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kUnitsPerCol = kThreads * (kAligned ? 1 : kVec<T>);
  // Several columns a thread keep loads in flight where few rows are valid; but there should be work for all blocks.
  const int64_t cols = (p.num_units + kUnitsPerCol - 1) / kUnitsPerCol, slots = int64_t(num_sms) * kBlocksPerSM;
  p.tile_cols = cols >= 2 * kMaxCols * slots ? kMaxCols : cols >= 4 * slots ? 2 : 1;
  const int64_t blocks = (cols + p.tile_cols - 1) / p.tile_cols;
  sum_rows_kernel<T, kAligned, kPlain><<<unsigned(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

// Tiles of any size: the output in slices of kMaxUnits, the rows in groups of kMaxRows with their sums carried over.
// fill(p, first row, elements per unit) writes the launch's rows.
template <typename T, typename Fill>
int sum_tiles(const SumArgs& a, bool aligned, void* workspace, cudaStream_t stream, Fill&& fill) {
  int num_sms = 0;
  if (const cudaError_t e = count_sms(&num_sms)) return e;
  const bool one_launch = a.num_rows <= kMaxRows;
  return with_variant<T>(aligned, one_launch && is_plain(a), [&](auto is_aligned, auto plain) -> int {
    constexpr int64_t kUnit = is_aligned ? kVec<T> : 1;
    const int64_t total = a.size * a.width / kUnit;
    RowsParams p;
    p.size = a.size;
    p.units_per_position = a.width / kUnit;
    p.device.lengths = nullptr;
    for (p.first_unit = 0; p.first_unit < total; p.first_unit += kMaxUnits) {
      p.num_units = int(std::min(total - p.first_unit, kMaxUnits));
      p.epilogue = make_epilogue(a, p.first_unit * kUnit, workspace);
      int64_t row = 0;
      do {
        p.first_row = int(row);
        p.num_rows = int(std::min<int64_t>(a.num_rows - row, kMaxRows));
        fill(p, kUnit);
        p.epilogue.carry_in = row > 0;
        row += p.num_rows;
        p.epilogue.carry_out = row < a.num_rows;
        p.epilogue.plain = one_launch && p.epilogue.plain;
        if (const int error = launch_tiles<T, is_aligned, plain>(p, num_sms, stream)) return error;
      } while (row < a.num_rows);
    }
    return 0;
  });
}

}  // namespace

int64_t workspace_bytes(const SumArgs& a) {
  if (a.num_rows <= kMaxRows) return 0;
  return a.size * a.width * ((accumulates_in_float(a.in_dtype) ? 4 : 8) + (a.finish.mean ? 4 : 0));
}

int sum_rows_cuda(const SumArgs& a, const Row* rows, void* workspace, void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  const int64_t total = a.size * a.width, bytes = dtype_bytes(a.in_dtype), vec = vector_elements(a.in_dtype);
  if (total == 0) return 0;
  bool aligned = total % vec == 0 && is_multiple(a.out, 16);
  int64_t moved = total * bytes;
  for (int64_t r = 0; r < a.num_rows; ++r) {
    if (rows[r].begin == rows[r].end) continue;
    aligned = aligned && rows[r].begin % vec == 0 && rows[r].end % vec == 0 && is_multiple(rows[r].data, vec * bytes);
    moved += (rows[r].end - rows[r].begin) * bytes;
  }
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (a.num_rows <= kFewRows && moved <= kFewRowsBytes) return sum_few<T>(a, rows, aligned, stream);
    if (a.num_rows <= kManyRows && moved <= kManyRowsBytes) return sum_many<T>(a, rows, stream);
    return sum_tiles<T>(a, aligned, workspace, stream, [&](RowsParams& p, int64_t unit) {
      for (int r = 0; r < p.num_rows; ++r)
        p.rows[r] = clip_row(rows[p.first_row + r], p.first_unit, p.num_units, unit, unit * bytes);
    });
  });
}

int sum_device_rows_cuda(const SumArgs& a, const DeviceRows& d, void* workspace, void* cuda_stream) {
  if (a.size * a.width == 0) return 0;
  const int64_t bytes = dtype_bytes(a.in_dtype), vec = vector_elements(a.in_dtype);
  const bool aligned =
      a.width % vec == 0 && is_multiple(a.out, 16) && is_multiple(d.data, vec * bytes) && d.row_stride % vec == 0;
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    return sum_tiles<T>(a, aligned, workspace, static_cast<cudaStream_t>(cuda_stream),
                        [&](RowsParams& p, int64_t) { p.device = d; });
  });
}

}  // namespace shardsum
