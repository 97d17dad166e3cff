// The CPU path: cut the flat output where the set of contributing rows changes, share the work out, run a kernel.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace shardsum {
namespace {

constexpr int64_t kBytesPerTask = 128 << 10;  // less is not worth waking a thread for

int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    default:
      return 8;
  }
}

CpuKernels select_kernels(DType in, DType out) {
#ifdef __x86_64__
  static const int level = [] {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      return 2;
    }
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? 1 : 0;
  }();
  if (level == 2) return avx512::kernels(in, out);
  if (level == 1) return avx2::kernels(in, out);
#endif
  return baseline::kernels(in, out);
}

// body(task) for task = 0, 1, ..., tasks - 1, on the intra-op threads of torch.
template <class Body>
void run_tasks(int64_t tasks, const Body& body) {
  auto run = [](int64_t begin, int64_t end, void* context) {
    for (int64_t task = begin; task < end; ++task) (*static_cast<const Body*>(context))(task);
  };
  if (tasks == 1) return body(0);
  torch_parallel_for(0, tasks, 1, run, const_cast<Body*>(&body));
}

int64_t num_tasks(int64_t bytes) {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return std::max<int64_t>(1, std::min<int64_t>(threads, bytes / kBytesPerTask));
}

// A run of the flat output with a constant set of rows; `work` counts the bytes moved before it.
struct Span {
  int64_t begin;
  int64_t end;
  int64_t bytes_per_element;
  int64_t work;
};

std::vector<Span> spans_of(const SumArgs& args, const Row* rows) {
  std::vector<int64_t> cuts{0, args.size * args.width};
  for (int64_t r = 0; r < args.num_rows; ++r) {
    if (rows[r].begin < rows[r].end) cuts.insert(cuts.end(), {rows[r].begin, rows[r].end});
  }
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
  std::vector<Span> spans;
  int64_t work = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    int64_t active = 0;
    for (int64_t r = 0; r < args.num_rows; ++r) active += rows[r].begin <= cuts[i] && cuts[i] < rows[r].end;
    spans.push_back({cuts[i], cuts[i + 1], active * bytes_of(args.in_dtype) + bytes_of(args.out_dtype), work});
    work += (cuts[i + 1] - cuts[i]) * spans.back().bytes_per_element;
  }
  spans.push_back({cuts.back(), cuts.back(), 1, work});
  return spans;
}

// The flat index before which `work` bytes are moved, rounded down to whole tiles.
int64_t index_at(const std::vector<Span>& spans, int64_t work) {
  auto after = std::upper_bound(spans.begin(), spans.end(), work, [](int64_t w, const Span& s) { return w < s.work; });
  const Span& span = *std::prev(after);
  const int64_t index = span.begin + (work - span.work) / span.bytes_per_element;
  return index == spans.back().end ? index : index / 64 * 64;
}

}  // namespace

void sum_rows_cpu(const SumArgs& args, const Row* rows) {
  const CpuKernels kernels = select_kernels(args.in_dtype, args.out_dtype);
  const std::vector<Span> spans = spans_of(args, rows);
  const int64_t total = spans.back().work, tasks = num_tasks(total);
  const int64_t in_bytes = bytes_of(args.in_dtype), out_bytes = bytes_of(args.out_dtype);
  run_tasks(tasks, [&](int64_t task) {
    const int64_t first = index_at(spans, total / tasks * task);
    const int64_t last = task + 1 == tasks ? spans.back().end : index_at(spans, total / tasks * (task + 1));
    std::vector<const void*> active;
    active.reserve(args.num_rows);
    for (const Span& span : spans) {
      const int64_t begin = std::max(first, span.begin), end = std::min(last, span.end);
      if (begin >= end) continue;
      active.clear();
      for (int64_t r = 0; r < args.num_rows; ++r) {
        const Row& row = rows[r];
        if (row.begin <= begin && begin < row.end) {
          active.push_back(static_cast<const char*>(row.data) + (begin - row.begin) * in_bytes);
        }
      }
      kernels.span(active.data(), active.size(), static_cast<char*>(args.out) + begin * out_bytes, end - begin,
                   args.finish);
    }
  });
}

namespace {

// Bit i: whether the row contributes at position first + i, for `count` <= 64 positions.
uint64_t mask_word(const Mask& mask, int64_t row, int64_t first, int64_t count) {
  uint64_t word = 0;
  if (mask.bits) {
    const uint32_t* words = static_cast<const uint32_t*>(mask.data) + row * mask.stride + first / 32;
    word = words[0];
    if (count > 32) word |= static_cast<uint64_t>(words[1]) << 32;
  } else {
    const uint8_t* bytes = static_cast<const uint8_t*>(mask.data) + row * mask.stride + first;
    for (int64_t i = 0; i < count; ++i) word |= static_cast<uint64_t>(bytes[i] != 0) << i;
  }
  return count == 64 ? word : word & ((uint64_t{1} << count) - 1);
}

}  // namespace

void sum_masked_cpu(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask) {
  const CpuKernels kernels = select_kernels(args.in_dtype, args.out_dtype);
  const int64_t in_bytes = bytes_of(args.in_dtype), out_bytes = bytes_of(args.out_dtype);
  const int64_t blocks = (args.size + 63) / 64;
  const int64_t bytes = args.size * args.width * (args.num_rows * in_bytes + out_bytes);
  const int64_t tasks = std::min(blocks, num_tasks(bytes));
  run_tasks(tasks, [&](int64_t task) {
    std::vector<uint64_t> words(args.num_rows);
    std::vector<const void*> active;
    active.reserve(args.num_rows);
    for (int64_t block = blocks * task / tasks; block < blocks * (task + 1) / tasks; ++block) {
      const int64_t first = block * 64, count = std::min<int64_t>(64, args.size - first);
      const char* in = static_cast<const char*>(data) + first * args.width * in_bytes;
      char* out = static_cast<char*>(args.out) + first * args.width * out_bytes;
      uint64_t changes = 0;  // bit i: the rows of position i + 1 are not those of position i
      for (int64_t r = 0; r < args.num_rows; ++r) {
        words[r] = mask_word(mask, r, first, count);
        changes |= words[r] ^ words[r] >> 1;
      }
      if (args.width == 1) {
        kernels.masked(in, row_stride, args.num_rows, words.data(), out, count, args.finish);
        continue;
      }
      for (int64_t begin = 0, end; begin < count; begin = end) {
        const uint64_t later = changes >> begin;
        end = later ? std::min<int64_t>(count, begin + __builtin_ctzll(later) + 1) : count;
        active.clear();
        for (int64_t r = 0; r < args.num_rows; ++r) {
          if (words[r] >> begin & 1) active.push_back(in + (r * row_stride + begin * args.width) * in_bytes);
        }
        kernels.span(active.data(), active.size(), out + begin * args.width * out_bytes, (end - begin) * args.width,
                     args.finish);
      }
    }
  });
}

}  // namespace shardsum
