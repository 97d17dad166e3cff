// Launchers of the ragged sum.
#include <algorithm>

#include "launch.h"
#include "sum_small.cuh"

namespace shardsum {
namespace {

// Small outputs are bound by latency; where these kernels stop paying was measured (docs/engineering/kernel.md). Few
// rows: a thread per element, later four, or per vector; many rows: up to so many elements.
constexpr int64_t kOneElement = 1 << 10, kFourElements = 1 << 15, kFewElements = 1 << 18, kFewBytes = 8 << 20;
constexpr int64_t kManyElements = 1 << 15, kManyDeviceElements = 1 << 12;  // less for few rows of device lengths
// Shapes of tiles, by rows.
constexpr int kMaxColsRows = 16, kNarrowRows = 16;

int64_t clip(int64_t value, int64_t last) { return std::min(std::max(value, int64_t(0)), last); }

RowRange clip_row(const Row& row, int64_t first, int64_t count, int64_t unit, int64_t unit_bytes) {
  if (row.begin == row.end) return {nullptr, 0, 0};
  const int64_t begin = row.begin / unit - first, end = row.end / unit - first;
  return {static_cast<const char*>(row.data) - begin * unit_bytes, int(clip(begin, count)), int(clip(end, count))};
}

template <typename T, bool kAligned, bool kPlain, int kItems = 1, typename Rows>
int launch_few(const SumArgs& a, const Rows& rows, cudaStream_t stream) {
  FewRowsParams<Rows> p;
  p.rows = rows;
  p.epilogue = make_epilogue(a);
  p.out = a.out;
  p.num_units = int(a.size * a.width / (kAligned ? kVec<T> : 1));
  constexpr int kPerBlock = kFewThreads * kItems;
  return launch(sum_few_rows_kernel<T, kAligned, kPlain, kItems, Rows>, (p.num_units + kPerBlock - 1) / kPerBlock,
                kFewThreads, stream, p);
}

template <typename T, bool kAligned, bool kPlain, int ROWS, int kItems = 1>
int launch_listed(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  constexpr int kUnit = kAligned ? kVec<T> : 1;
  const int64_t num_units = a.size * a.width / kUnit;
  ListedRows<ROWS> list{};
  for (int r = 0; r < a.num_rows; ++r) {
    const RowRange row = clip_row(rows[r], 0, num_units, kUnit, kUnit * sizeof(T));
    list.begins[r] = row.begin;
    list.lengths[r] = row.end - row.begin;
    list.origins[r] = row.origin;
  }
  return launch_few<T, kAligned, kPlain, kItems>(a, list, stream);
}

// Fills a table of rows at one distance from each other that begin with the output, as those of a padded tensor do.
// False where they do not.
template <int ROWS>
bool fill_strided(StridedRows<ROWS>& list, const SumArgs& a, const Row* rows) {
  const char* first = nullptr;
  int64_t first_row = 0, stride = -1;  // of the rows that are not empty
  for (int64_t r = 0; r < a.num_rows; ++r) {
    list.lengths[r] = int(rows[r].end - rows[r].begin);
    if (list.lengths[r] == 0) continue;
    const char* data = static_cast<const char*>(rows[r].data);
    if (first == nullptr) {
      first = data;
      first_row = r;
    } else if (stride < 0) {
      stride = (data - first) / (r - first_row);
    }
    if (rows[r].begin != 0 || data < first || data - first != (r - first_row) * stride) return false;
  }
  if (stride > UINT32_MAX) return false;
  list.stride = unsigned(std::max<int64_t>(stride, 0));
  list.first = first - first_row * list.stride;
  return true;
}

template <typename T, bool kAligned, int kItems>
int launch_plain_few(const SumArgs& a, const Row* rows, cudaStream_t stream) {
  if (a.num_rows <= 2) return launch_listed<T, kAligned, true, 2, kItems>(a, rows, stream);
  if (a.num_rows <= 4) return launch_listed<T, kAligned, true, 4, kItems>(a, rows, stream);
  return launch_listed<T, kAligned, true, kFewRows, kItems>(a, rows, stream);
}

template <typename T>
int sum_few(const SumArgs& a, const Row* rows, bool aligned, cudaStream_t stream) {
  if constexpr (accumulates_in_float_v<T>) {
    const int64_t total = a.size * a.width;
    const bool vectors = aligned && total > kOneElement, plain = is_plain(a);
    if (vectors)
      return plain ? launch_plain_few<T, true, 1>(a, rows, stream)
                   : launch_listed<T, true, false, kFewRows>(a, rows, stream);
    if (plain)
      return total > kFourElements ? launch_plain_few<T, false, 4>(a, rows, stream)
                                   : launch_plain_few<T, false, 1>(a, rows, stream);
  }
  return launch_listed<T, false, false, kFewRows>(a, rows, stream);
}

template <typename T, typename Fill>
int sum_many(const SumArgs& a, cudaStream_t stream, Fill&& fill) {
  RowsParams p;
  p.epilogue = make_epilogue(a);
  p.num_units = int(a.size * a.width);
  p.num_rows = int(a.num_rows);
  p.first_row = 0;
  p.first_unit = 0;
  p.size = a.size;
  p.units_per_position = a.width;
  p.device.lengths = nullptr;
  fill(p, 1);
  return launch(sum_many_rows_kernel<T>, (p.num_units + 31) / 32, kManyThreads, stream, p);
}

// Up to ROWS rows of a padded tensor, else any rows.
template <typename T, int ROWS, typename Fill>
int sum_many_strided(const SumArgs& a, const Row* rows, cudaStream_t stream, Fill&& fill) {
  StridedRows<ROWS> list{};
  if (!fill_strided(list, a, rows)) return sum_many<T>(a, stream, fill);
  return launch_few<T, false, true>(a, list, stream);
}

template <typename T, typename Fill>
int sum_many(const SumArgs& a, const Row* rows, cudaStream_t stream, Fill&& fill) {
  if constexpr (accumulates_in_float_v<T>) {
    if (is_plain(a) && a.num_rows <= kStridedFew) return sum_many_strided<T, kStridedFew>(a, rows, stream, fill);
    if (is_plain(a) && a.num_rows <= kStridedRows) return sum_many_strided<T, kStridedRows>(a, rows, stream, fill);
  }
  return sum_many<T>(a, stream, fill);
}

template <typename T, bool kAligned>
int launch_tiles(RowsParams& p, int num_sms, cudaStream_t stream) {
  constexpr int kUnitsPerCol = kThreads * (kAligned ? 1 : kVec<T>);
  // Several columns a thread keep loads in flight where few rows are valid; but there should be work for all blocks.
  const int64_t cols = (p.num_units + kUnitsPerCol - 1) / kUnitsPerCol, slots = int64_t(num_sms) * kBlocksPerSM;
  p.tile_cols = cols >= 8 * slots && p.num_rows <= kMaxColsRows ? kMaxCols : cols >= 3 * slots ? 2 : 1;
  // Where many rows overlap, mostly at the front, a wide tile would still be at work when all others are done.
  p.narrow_tiles = p.num_rows >= kNarrowRows ? int(cols / 8) : 0;
  const int64_t blocks = p.narrow_tiles + (cols - p.narrow_tiles + p.tile_cols - 1) / p.tile_cols;
  return launch(sum_rows_kernel<T, kAligned>, blocks, kThreads, stream, p);
}

// The output in slices of kMaxUnits, the rows in groups of kMaxRows with their sums carried over.
// fill(p, elements per unit) writes the launch's rows.
template <typename T, bool kAligned, typename Fill>
int sum_tiles(const SumArgs& a, void* workspace, int num_sms, cudaStream_t stream, Fill&& fill) {
  constexpr int64_t kUnit = kAligned ? kVec<T> : 1;
  const bool one_launch = a.num_rows <= kMaxRows;
  const int64_t total = a.size * a.width / kUnit;
  RowsParams p;
  p.size = a.size;
  p.units_per_position = a.width / kUnit;
  p.device.lengths = nullptr;
  for (p.first_unit = 0; p.first_unit < total; p.first_unit += kMaxUnits) {
    p.num_units = int(std::min(total - p.first_unit, kMaxUnits));
    p.epilogue = make_epilogue(a, p.first_unit * kUnit, workspace);
    p.epilogue.plain = one_launch && p.epilogue.plain;
    p.epilogue.direct = one_launch && p.epilogue.direct;
    int64_t row = 0;
    do {
      p.first_row = int(row);
      p.num_rows = int(std::min<int64_t>(a.num_rows - row, kMaxRows));
      fill(p, kUnit);
      p.epilogue.carry_in = row > 0;
      row += p.num_rows;
      p.epilogue.carry_out = row < a.num_rows;
      if (const int error = launch_tiles<T, kAligned>(p, num_sms, stream)) return error;
    } while (row < a.num_rows);
  }
  return 0;
}

template <typename T, typename Fill>
int sum_tiles(const SumArgs& a, bool aligned, void* workspace, cudaStream_t stream, Fill&& fill) {
  int num_sms = 0;
  if (const cudaError_t e = count_sms(&num_sms)) return e;
  // Only dtypes that accumulate in fp32 have a kernel for whole vectors.
  if constexpr (accumulates_in_float_v<T>)
    if (aligned) return sum_tiles<T, true>(a, workspace, num_sms, stream, fill);
  return sum_tiles<T, false>(a, workspace, num_sms, stream, fill);
}

}  // namespace

int current_cuda_device(int* device) { return cudaGetDevice(device); }

int64_t workspace_bytes(const SumArgs& a) {
  if (a.num_rows <= kMaxRows) return 0;
  return a.size * a.width * (accumulator_size(a.in_dtype) + (a.finish.mean ? 4 : 0));
}

int sum_rows_cuda(const SumArgs& a, const Row* rows, void* workspace, void* cuda_stream) {
  const auto stream = static_cast<cudaStream_t>(cuda_stream);
  const int64_t total = a.size * a.width, bytes = element_size(a.in_dtype), vec = vector_elements(a.in_dtype);
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
    const bool vectors = aligned && accumulates_in_float_v<T>;
    if (a.num_rows <= kFewRows && (vectors ? moved <= kFewBytes : total <= kFewElements))
      return sum_few<T>(a, rows, aligned, stream);
    const auto fill = [&](RowsParams& p, int64_t unit) {
      for (int r = 0; r < p.num_rows; ++r)
        p.rows[r] = clip_row(rows[p.first_row + r], p.first_unit, p.num_units, unit, unit * bytes);
    };
    if (a.num_rows <= kManyRows && total <= kManyElements) return sum_many<T>(a, rows, stream, fill);
    return sum_tiles<T>(a, aligned, workspace, stream, fill);
  });
}

int sum_device_rows_cuda(const SumArgs& a, const DeviceRows& d, void* workspace, void* cuda_stream) {
  if (a.size * a.width == 0) return 0;
  const int64_t bytes = element_size(a.in_dtype), vec = vector_elements(a.in_dtype);
  const bool aligned =
      a.width % vec == 0 && is_multiple(a.out, 16) && is_multiple(d.data, vec * bytes) && d.row_stride % vec == 0;
  return dispatch(a.in_dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto stream = static_cast<cudaStream_t>(cuda_stream);
    const auto fill = [&](RowsParams& p, int64_t) { p.device = d; };
    const int64_t most = a.num_rows <= kStridedFew ? kManyDeviceElements : kManyElements;
    if (a.num_rows <= kManyRows && a.size * a.width <= most) return sum_many<T>(a, stream, fill);
    return sum_tiles<T>(a, aligned, workspace, stream, fill);
  });
}

}  // namespace shardsum
