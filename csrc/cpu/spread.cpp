// The adjoint of a sum of rows: copies, and zeros around them.
#include <cstring>

#include "../row_table.h"
#include "tasks.h"

namespace shardsum {
namespace {

// Bytes [begin, end) of one row of the output.
void spread_row(char* out, const char* in, const SpreadRow& row, int64_t begin, int64_t end) {
  const int64_t first = std::min(std::max(row.begin, begin), end), last = std::min(std::max(row.end, first), end);
  std::memset(out + begin, 0, first - begin);
  if (first < last) std::memcpy(out + first, in + row.source + (first - row.begin), last - first);
  std::memset(out + last, 0, end - last);
}

}  // namespace

void spread_cpu(const SpreadArgs& args, const SpreadRow* rows) {
  const int64_t total = args.num_rows * args.row_bytes, tasks = num_tasks(2 * total);
  run_tasks(tasks, [&](int64_t task) {
    int64_t at = total / tasks * task;
    const int64_t end = task + 1 == tasks ? total : total / tasks * (task + 1);
    while (at < end) {
      const int64_t r = at / args.row_bytes, row_at = r * args.row_bytes, stop = std::min(end, row_at + args.row_bytes);
      spread_row(static_cast<char*>(args.out) + row_at, static_cast<const char*>(args.in), rows[r], at - row_at,
                 stop - row_at);
      at = stop;
    }
  });
}

}  // namespace shardsum
