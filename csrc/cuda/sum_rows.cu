// Launchers of the ragged sum.
#include <algorithm>

#include "launch.h"
#include "sum_few_rows.cuh"
#include "sum_rows.cuh"

namespace shardsum {
namespace {

// Outputs up to these sizes are latency-bound: one thread per vector (per element) and row bounds as plain arguments.
constexpr int64_t kFewElements = 1 << 20, kOneElementAThread = 1 << 15;

Epilogue make_epilogue(const SumArgs& a, void* workspace) {
  Epilogue e = make_epilogue(a);
  const int64_t acc_bytes = accumulates_in_float(a.in_dtype) ? 4 : 8;
  e.carry = workspace;
  if (e.mean && workspace != nullptr)
    e.carry_count = reinterpret_cast<int32_t*>(static_cast<char*>(workspace) + a.size * a.width * acc_bytes);
  return e;
}

template <typename T, bool kAligned>
int launch(RowsParams& p, int num_sms, cudaStream_t stream) {
  const int64_t vectors = kAligned ? p.num_units : (p.num_units + kVec<T> - 1) / kVec<T>;
  const int64_t columns = (vectors + 31) / 32;
  const int64_t warps = int64_t(num_sms) * kBlocksPerSM * kWarps;
  // Wide tiles amortise the list of rows and leave loads to issue where few rows are valid; but the last round of the
  // cyclic order is not full, so there should be several.
  p.tile_cols = columns >= 16 * warps ? 4 : columns >= 8 * warps ? 2 : 1;
  p.num_tiles = (columns + p.tile_cols - 1) / p.tile_cols;
  const int64_t blocks = std::min((p.num_tiles + kWarps - 1) / kWarps, int64_t(num_sms) * kBlocksPerSM);
  const size_t smem = kWarps * (p.num_rows + kBatch) * sizeof(Active) + p.num_rows * sizeof(RowRange);
  sum_rows_kernel<T, kAligned><<<unsigned(blocks), kThreads, smem, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kAligned, int ROWS>
int launch_few(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  constexpr int kUnit = kAligned ? kVec<T> : 1, kBytes = kUnit * int(sizeof(T));
  FewRowsParams<ROWS> p{};
  p.epilogue = make_epilogue(a);
  p.num_units = int(a.size * a.width / kUnit);
  for (int r = 0; r < a.num_rows; ++r) {
    p.begin[r] = int(rows[r].begin / kUnit);
    p.length[r] = int((rows[r].end - rows[r].begin) / kUnit);
    p.origin[r] = static_cast<const char*>(rows[r].data) - int64_t(p.begin[r]) * kBytes;
  }
  const int threads = p.num_units <= 32 ? 32 : p.num_units <= 64 ? 64 : 128;
  const int blocks = (p.num_units + threads - 1) / threads;
  sum_few_rows_kernel<T, kAligned, ROWS><<<blocks, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename T, bool kAligned>
int launch_few(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  return a.num_rows <= 4 ? launch_few<T, kAligned, 4>(a, rows, stream) : launch_few<T, kAligned, 8>(a, rows, stream);
}

// Calls fill(first_row, num_rows, p) before each launch of up to kMaxRows rows.
template <typename Fill>
int launch_all(const SumArgs& a, bool aligned, void* workspace, cudaStream_t stream, Fill&& fill) {
  int num_sms = 0;
  if (const cudaError_t e = count_sms(&num_sms)) return e;
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    constexpr bool kHot = accumulates_in_float_v<T>;  // these dtypes have a kernel for whole vectors
    const int64_t unit = aligned && kHot ? kVec<T> : 1;
    RowsParams p;
    p.epilogue = make_epilogue(a, workspace);
    p.num_units = a.size * a.width / unit;
    p.size = a.size;
    p.units_per_position = a.width / unit;
    p.device.lengths = nullptr;
    int64_t row = 0;
    do {
      p.num_rows = int(std::min<int64_t>(a.num_rows - row, kMaxRows));
      p.first_row = row;
      fill(row, unit, p);
      p.epilogue.carry_in = row > 0;
      row += p.num_rows;
      p.epilogue.carry_out = row < a.num_rows;
      if (a.num_rows > kMaxRows) p.epilogue.plain = false;
      int error;
      if constexpr (kHot) error = unit > 1 ? launch<T, true>(p, num_sms, stream) : launch<T, false>(p, num_sms, stream);
      else error = launch<T, false>(p, num_sms, stream);
      if (error) return error;
    } while (row < a.num_rows);
    return 0;
  });
}

}  // namespace

int64_t workspace_bytes(const SumArgs& a) {
  if (a.num_rows <= kMaxRows) return 0;
  return a.size * a.width * ((accumulates_in_float(a.in_dtype) ? 4 : 8) + (a.finish.mean ? 4 : 0));
}

int sum_rows_cuda(const SumArgs& a, const Row* rows, void* workspace, void* stream) {
  const int64_t total = a.size * a.width;
  if (total == 0) return 0;
  const int64_t bytes = dtype_bytes(a.in_dtype), vec = vector_elements(a.in_dtype);
  bool aligned = total % vec == 0 && is_multiple(a.out, 16);
  for (int64_t r = 0; r < a.num_rows && aligned; ++r)
    aligned = rows[r].begin == rows[r].end ||
              (rows[r].begin % vec == 0 && rows[r].end % vec == 0 && is_multiple(rows[r].data, vec * bytes));
  if (a.num_rows <= kFewRows && total <= kFewElements) {
    return dispatch(a.in_dtype, [&](auto type) -> int {
      using T = typename decltype(type)::type;
      if constexpr (accumulates_in_float_v<T>)
        if (aligned && total > kOneElementAThread) return launch_few<T, true>(a, rows, static_cast<cudaStream_t>(stream));
      return launch_few<T, false>(a, rows, static_cast<cudaStream_t>(stream));
    });
  }
  return launch_all(a, aligned, workspace, static_cast<cudaStream_t>(stream),
                    [&](int64_t first, int64_t unit, RowsParams& p) {
                      for (int r = 0; r < p.num_rows; ++r) {
                        const Row& row = rows[first + r];
                        const bool empty = row.begin == row.end;
                        p.rows[r] = {static_cast<const char*>(row.data) - (empty ? 0 : row.begin * bytes),
                                     empty ? 0 : row.begin / unit, empty ? 0 : row.end / unit};
                      }
                    });
}

int sum_device_rows_cuda(const SumArgs& a, const DeviceRows& d, void* workspace, void* stream) {
  if (a.size * a.width == 0) return 0;
  const int64_t bytes = dtype_bytes(a.in_dtype), vec = vector_elements(a.in_dtype);
  const bool aligned = a.width % vec == 0 && is_multiple(a.out, 16) && is_multiple(d.data, vec * bytes) &&
                       d.row_stride % vec == 0;
  return launch_all(a, aligned, workspace, static_cast<cudaStream_t>(stream),
                    [&](int64_t, int64_t, RowsParams& p) { p.device = d; });
}

}  // namespace shardsum
