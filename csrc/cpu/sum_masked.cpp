// Masked sums: the mask is read as words of 64 positions, and neighbouring positions with the same rows go together.
#include <algorithm>
#include <atomic>

#include "../table.h"
#include "kernels.h"
#include "tasks.h"

namespace shardsum {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kPrefetchBytes = 1024;

// What one thread needs for the block at hand and, of the next run, for the one after.
struct Scratch {
  explicit Scratch(int64_t num_rows)
      : words(num_rows), active{Table<const void*>(num_rows), Table<const void*>(num_rows)} {}
  Table<uint64_t> words;
  Table<const void*> active[2];
};

// One masked sum; a block is 64 positions of it.
struct MaskedSum {
  const SumArgs& args;
  const char* data;
  int64_t row_stride;
  const Mask& mask;
  CpuKernels kernels;

  // Bit i: whether row r contributes at position first + i.
  uint64_t word(int64_t r, int64_t first, int64_t count) const {
    if (!mask.bits) return kernels.pack(static_cast<const uint8_t*>(mask.data) + r * mask.stride + first, count);
    const uint32_t* words = static_cast<const uint32_t*>(mask.data) + r * mask.stride + first / 32;
    const uint64_t both = words[0] | (count > 32 ? static_cast<uint64_t>(words[1]) << 32 : 0);
    return count == kBlock ? both : both & ((uint64_t{1} << count) - 1);
  }

  void sum_block(int64_t block, Scratch& scratch) const {
    const int64_t first = block * kBlock, count = std::min(kBlock, args.size - first);
    uint64_t changes = 0;  // bit i: position i + 1 does not have the rows of position i
    for (int64_t r = 0; r < args.num_rows; ++r) {
      const uint64_t w = scratch.words[r] = word(r, first, count);
      changes |= w ^ w >> 1;
    }
    const int64_t position_bytes = args.width * element_size(args.in_dtype);
    const char* in = data + first * position_bytes;
    char* out = static_cast<char*>(args.out) + first * args.width * element_size(args.out_dtype);
    if (args.width == 1) {
      kernels.masked({in, row_stride, args.num_rows, scratch.words.data(), count}, out, args.finish);
      return;
    }
    Run run = next_run(in, 0, count, changes, scratch.active[0], scratch);
    for (int64_t i = 1; run.begin < count; ++i) {
      const Run later = next_run(in, run.end, count, changes, scratch.active[i & 1], scratch);
      kernels.span(scratch.active[~i & 1].data(), run.num_active, nullptr,
                   out + run.begin * args.width * element_size(args.out_dtype), (run.end - run.begin) * args.width,
                   args.finish, false);
      run = later;
    }
  }

  // Neighbouring positions that the same rows contribute to.
  struct Run {
    int64_t begin;
    int64_t end;
    int64_t num_active;
  };

  // The run from `begin` on, its rows listed in `active` and asked for: no stride announces where they are.
  Run next_run(const char* in, int64_t begin, int64_t count, uint64_t changes, Table<const void*>& active,
               Scratch& scratch) const {
    if (begin >= count) return {count, count, 0};
    const uint64_t later = changes >> begin;
    const int64_t end = later ? std::min(count, begin + __builtin_ctzll(later) + 1) : count;
    const int64_t position_bytes = args.width * element_size(args.in_dtype);
    const int64_t prefetched = std::min(kPrefetchBytes, (end - begin) * position_bytes);
    const int64_t row_bytes = row_stride * element_size(args.in_dtype);
    const char* p = in + begin * position_bytes;
    int64_t num_active = 0;
    for (int64_t r = 0; r < args.num_rows; ++r, p += row_bytes) {
      active[num_active] = p;  // no branch: a mask has no pattern to predict
      num_active += scratch.words[r] >> begin & 1;
    }
    for (int64_t k = 0; k < num_active; ++k) {
      for (int64_t at = 0; at < prefetched; at += 64) __builtin_prefetch(static_cast<const char*>(active[k]) + at);
    }
    return {begin, end, num_active};
  }
};

}  // namespace

void sum_masked_cpu(const SumArgs& args, const void* data, int64_t row_stride, const Mask& mask) {
  const MaskedSum sum{args, static_cast<const char*>(data), row_stride, mask,
                      select_kernels(args.in_dtype, args.out_dtype)};
  const int64_t blocks = (args.size + kBlock - 1) / kBlock;
  const int64_t block_bytes = std::min(kBlock, args.size) * args.width *
                              (args.num_rows * element_size(args.in_dtype) + element_size(args.out_dtype));
  // How much a block costs is only known once its mask is read: threads take the next blocks when they are free.
  const int64_t blocks_at_once = std::max<int64_t>(1, kBytesPerTask / (block_bytes + 1));
  std::atomic<int64_t> next{0};
  run_tasks(std::min(blocks, num_tasks(blocks * block_bytes)), [&](int64_t) {
    Scratch scratch(args.num_rows);
    for (int64_t begin; (begin = next.fetch_add(blocks_at_once)) < blocks;) {
      const int64_t end = std::min(blocks, begin + blocks_at_once);
      for (int64_t block = begin; block < end; ++block) sum.sum_block(block, scratch);
    }
  });
}

}  // namespace shardsum
