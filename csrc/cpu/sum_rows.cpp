// Sums of rows: cut the flat output where the set of rows changes, give every thread the same number of bytes.
#include <algorithm>

#include "../table.h"
#include "kernels.h"
#include "tasks.h"

namespace shardsum {
namespace {

// Moved for each element of the output, whatever rows cover it.
int64_t fixed_bytes(const SumArgs& args) {
  return element_size(args.out_dtype) + (args.carry ? accumulator_size(args.in_dtype) : 0);
}

// Elements [begin, end) have one set of rows; `work` bytes are moved before them.
struct Span {
  int64_t begin;
  int64_t end;
  int64_t bytes_per_element;
  int64_t work;
};

// The spans in order, the last one empty and at the end: its `work` is the whole.
class Spans {
 public:
  Spans(const SumArgs& args, const Row* rows) : table_(2 * args.num_rows + 2) {
    Table<int64_t, 130> cuts(2 * args.num_rows + 2);
    int64_t num_cuts = 0;
    cuts[num_cuts++] = 0;
    cuts[num_cuts++] = args.size * args.width;
    for (int64_t r = 0; r < args.num_rows; ++r) {
      if (rows[r].begin == rows[r].end) continue;
      cuts[num_cuts++] = rows[r].begin;
      cuts[num_cuts++] = rows[r].end;
    }
    std::sort(cuts.data(), cuts.data() + num_cuts);
    num_cuts = std::unique(cuts.data(), cuts.data() + num_cuts) - cuts.data();
    int64_t work = 0;
    for (int64_t i = 0; i + 1 < num_cuts; ++i) {
      int64_t bytes = fixed_bytes(args);
      for (int64_t r = 0; r < args.num_rows; ++r) {
        if (rows[r].begin <= cuts[i] && cuts[i] < rows[r].end) bytes += element_size(args.in_dtype);
      }
      table_[size_++] = {cuts[i], cuts[i + 1], bytes, work};
      work += (cuts[i + 1] - cuts[i]) * bytes;
    }
    table_[size_++] = {cuts[num_cuts - 1], cuts[num_cuts - 1], 1, work};
  }

  const Span* begin() const { return table_.data(); }
  const Span* end() const { return begin() + size_; }
  int64_t work() const { return end()[-1].work; }

  // The element before which `work` bytes are moved; a multiple of 64, so that two threads share no cache line.
  int64_t element_at(int64_t work) const {
    const Span* after =
        std::upper_bound(begin(), end(), work, [](int64_t value, const Span& span) { return value < span.work; });
    const Span& span = after[-1];
    return (span.begin + (work - span.work) / span.bytes_per_element) / 64 * 64;
  }

 private:
  Table<Span, 130> table_;
  int64_t size_ = 0;
};

// The bytes that the sum moves.
int64_t moved_bytes(const SumArgs& args, const Row* rows) {
  int64_t elements = 0;
  for (int64_t r = 0; r < args.num_rows; ++r) elements += rows[r].end - rows[r].begin;
  return elements * element_size(args.in_dtype) + args.size * args.width * fixed_bytes(args);
}

// Whether the set of rows changes so often that going through it for every span costs more than it saves.
bool has_narrow_spans(const SumArgs& args, const Row* rows) {
  constexpr int64_t kNarrow = 96;  // elements a span; measured: blocks win up to 64, lose from 128 to 256 on
  int64_t changes = 0;
  for (int64_t r = 1; r < args.num_rows; ++r) {
    changes += rows[r].begin != rows[r - 1].begin || rows[r].end != rows[r - 1].end;
  }
  return args.size * args.width <= kNarrow * changes;
}

// Elements [first, last), block by block.
void sum_blocks(const SumArgs& args, const Row* rows, BlockKernel sum_block, int64_t first, int64_t last) {
  for (; first < last; first += kBlockElements) {
    sum_block(rows, args.num_rows, args.carry, args.out, first, std::min(last - first, kBlockElements), args.finish);
  }
}

// Elements [first, last), span by span.
void sum_spans(const SumArgs& args, const Row* rows, SpanKernel sum_span, int64_t first, int64_t last, bool stream) {
  const int64_t in_bytes = element_size(args.in_dtype), out_bytes = element_size(args.out_dtype);
  const int64_t carry_bytes = accumulator_size(args.in_dtype);
  const char* carry = static_cast<const char*>(args.carry);
  Table<const void*> active(args.num_rows);
  for (int64_t begin = first, end = last; begin < last; begin = end, end = last) {
    int64_t num_active = 0;
    for (int64_t r = 0; r < args.num_rows; ++r) {
      const Row& row = rows[r];
      if (begin >= row.end) continue;
      end = std::min(end, begin < row.begin ? row.begin : row.end);
      active[num_active] = static_cast<const char*>(row.data) + (begin - row.begin) * in_bytes;
      num_active += begin >= row.begin;
    }
    sum_span(active.data(), num_active, carry ? carry + begin * carry_bytes : nullptr,
             static_cast<char*>(args.out) + begin * out_bytes, end - begin, args.finish, stream);
  }
}

}  // namespace

void sum_rows_cpu(const SumArgs& args, const Row* rows) {
  const CpuKernels kernels = select_kernels(args.in_dtype, args.out_dtype);
  const int64_t elements = args.size * args.width, tasks = num_tasks(moved_bytes(args, rows));
  const bool stream = elements * element_size(args.out_dtype) >= kStreamingBytes && !args.finish.accumulate;
  const bool narrow = has_narrow_spans(args, rows);
  const auto sum = [&](int64_t first, int64_t last) {
    narrow ? sum_blocks(args, rows, kernels.block, first, last)
           : sum_spans(args, rows, kernels.span, first, last, stream);
  };
  if (tasks == 1) return sum(0, elements);
  const Spans spans(args, rows);
  const int64_t work = spans.work();
  run_tasks(tasks, [&](int64_t task) {
    const int64_t first = spans.element_at(work / tasks * task);
    const int64_t last = task + 1 == tasks ? elements : spans.element_at(work / tasks * (task + 1));
    sum(first, last);
  });
}

}  // namespace shardsum
