// The real code that pushes, awaits and empties words, run on the CPU lane by lane: every process first sends its
// bounds and words, then all sum. tests/peer/test_peer_words.py makes "push.cpp" and "stream.cpp" of the kernels'
// sources, in which memory accesses in PTX are those below, and feeds this program with plans.
//
// For each case on stdin: the plan's words of every process, then the tensors; see main(). Exit code 1, and a line that
// says why, if a word is sent twice, awaited and not sent, emptied and not there, left behind or outside the slot of
// its rank, if a result is not the sum, or if what a block leaves undone is not marked.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

using std::max;
using std::min;
static dim3 threadIdx, blockIdx, gridDim, blockDim(256);
static void __syncwarp() {}
static void __nanosleep(unsigned) {}
static bool __syncthreads_or(int any) { return any; }
static void __syncthreads() {}
static uint32_t atomicCAS(uint32_t* p, uint32_t, uint32_t) { return *p; }
static uint32_t __reduce_min_sync(unsigned, uint32_t v) { return v; }
static int __all_sync(unsigned, int v) { return v; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __dadd_rn(double a, double b) { return a + b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __ddiv_rn(double a, double b) { return a / b; }
static float __double2float_rn(double a) { return float(a); }
static float __uint_as_float(uint32_t a) {
  float v;
  std::memcpy(&v, &a, sizeof(v));
  return v;
}
static uint32_t __funnelshift_r(uint32_t lo, uint32_t hi, int shift) {
  return uint32_t(((uint64_t(hi) << 32) | lo) >> (shift & 31));
}
template <class T>
static T __ldg(const T* p) {
  T v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <class T>
static void __stcs(T* p, T v) {
  std::memcpy(p, &v, sizeof(v));
}
static unsigned __cvta_generic_to_shared(const void*) { return 0; }

// What the kernels' memory accesses do here.
static void copy_word(void* to, const void* from) { std::memcpy(to, from, 16); }
static void written(char* p, uint4 v);  // checks, then stores, one word of an inbox

#define __noinline__
#include "push.cpp"
#include "stream.cpp"

namespace shardsum {
namespace {

[[noreturn]] void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(1);
}
#define REQUIRE(condition, what) ((condition) ? void() : fail(what))

int64_t read() {
  long long value;
  REQUIRE(std::scanf("%lld", &value) == 1, "bad input");
  return value;
}

struct Words {
  int64_t take() { return read(); }
  template <class T>
  void take(T& to) {
    to = static_cast<T>(take());
  }
  template <class T>
  void take_pointer(T& to) {
    to = reinterpret_cast<T>(take());
  }
};
}  // namespace
}  // namespace shardsum
#include "plan.h"  // read_plan
namespace shardsum {
namespace {

struct Process {
  Plan plan;
  std::vector<uint4> memory;  // the symmetric block
  std::vector<std::vector<char>> shards, outs;
  std::vector<char*> data, out;
  std::vector<int64_t> lengths;  // on the device
  Shared s;
  PeerControl control{};
  PeerFailure failure{};
};
std::vector<Process> processes;
int running = 0;  // the process whose code runs
bool summing = false;
int dead_block = -1;  // which sums nothing, as its wait is over at once

const PeerCall& call_of(int process) { return processes[process].plan.call; }

// Bits that look like an empty word, where an element is to be a NaN.
template <class T>
void put(char* to, double value) {
  T v;
  if constexpr (accumulates_in_float_v<T>)
    v = T(float(value));
  else
    v = T(value);
  if (std::isnan(value)) std::memset(&v, 0xff, sizeof(v));  // it looks like an empty word
  std::memcpy(to, &v, sizeof(v));
}
void put_element(DType dtype, char* to, double value) {
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (!std::is_same_v<T, Bool>) put<T>(to, value);
    return 0;
  });
}
double get_element(DType dtype, const char* from) {
  double found = 0;
  dispatch(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T v;
    std::memcpy(&v, from, sizeof(v));
    if constexpr (!std::is_same_v<T, Bool>) found = double(to_acc(v));
    return 0;
  });
  return found;
}

template <class F>
void for_each_thread(const PeerCall& c, int first_warp, int last_warp, F&& f) {
  gridDim = dim3(c.num_blocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
    if (summing && int(blockIdx.x) == dead_block) continue;
    for (threadIdx.x = first_warp * 32; int(threadIdx.x) < last_warp * 32; ++threadIdx.x) f();
  }
  blockIdx.x = 0, threadIdx.x = 0;
}
// By the block that is dead, before others come to their sums.
void mark(const PeerCall& c) {
  blockIdx.x = dead_block;
  for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) fill_invalid(c);
}

template <class T>
void push_all(PeerCall& c, Shared& s) {
  if (c.producer_warps > 0)
    for_each_thread(c, 0, c.producer_warps, [&] { push_stretches(c, s, {warp_index(), c.producer_warps}); });
  else
    for_each_thread(c, 0, kPushWarps, [&] { push_groups<is_float_v<T>>(c, s); });
}
template <class T, class Out, DType kOut>
void sum_all(PeerCall& c, Shared& s) {
  if (c.producer_warps > 0) {
    find_hulls(c, s);
    if constexpr (is_float_v<T>)
      for_each_thread(c, c.producer_warps, kServiceWarp, [&] {
        sum_stretches<T, Out, kOut>(c, s, {warp_index() - c.producer_warps, kServiceWarp - c.producer_warps});
      });
  } else {
    for_each_thread(c, 0, kPushWarps, [&] { sum_groups<T, Out, kOut>(c, s); });
  }
}
void run(PeerCall& c, Shared& s) {
  switch (kind_of(c)) {
#define RUN(index, T, Out, in, out)                                                               \
  case index:                                                                                     \
    if constexpr (sizeof(T) > 1) summing ? sum_all<T, Out, DType::out>(c, s) : push_all<T>(c, s); \
    break;
    RUN(0, __nv_bfloat16, __nv_bfloat16, kBFloat16, kBFloat16)
    RUN(1, __nv_bfloat16, float, kBFloat16, kFloat32)
    RUN(3, __half, __half, kFloat16, kFloat16)
    RUN(6, float, float, kFloat32, kFloat32)
    RUN(7, float, __nv_bfloat16, kFloat32, kBFloat16)
    RUN(9, double, double, kFloat64, kFloat64)
    RUN(13, int16_t, int64_t, kInt16, kInt64)
    RUN(14, int32_t, int64_t, kInt32, kInt64)
    RUN(15, int64_t, int64_t, kInt64, kInt64)
#undef RUN
    default:
      fail("no such kind");
  }
}

// One launch of all processes: the chunk [begin, end).
void launch(int64_t begin, int64_t end, uint32_t epoch) {
  for (summing = false, running = 0; running < int(processes.size()); ++running) {
    Process& p = processes[running];
    PeerCall& c = p.plan.call;
    c.chunk_begin = begin, c.chunk_end = end;
    p.s.epoch = epoch, p.s.dead = 0;
    for (int i = 0; i < c.num_sources; ++i) {
      if (c.device_lengths != nullptr)
        describe_from_device(c, i, c.held[i]);
      else
        c.held[i] = describe_held(c, i, c.sources[i].start, c.sources[i].length);
    }
    for_each_thread(c, 0, 1, [&] {
      if (blockIdx.x == 0) send_rows(c, p.s);
    });
    run(c, p.s);
  }
  for (summing = true, running = 0; running < int(processes.size()); ++running) {
    Process& p = processes[running];
    PeerCall& c = p.plan.call;
    gridDim = dim3(c.num_blocks);
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) await_bounds(c, p.s);
    if (dead_block >= 0) mark(c);
    run(c, p.s);
    REQUIRE(!p.s.dead, "a word that is awaited was not sent");
  }
  if (dead_block >= 0) return;
  for (Process& p : processes) {
    const PeerCall& c = p.plan.call;
    const char* inboxes = c.base[c.process] + c.staging_at;
    for (int64_t i = 0; i < 2 * c.staging_bytes; ++i) REQUIRE(inboxes[i] == char(0xff), "a word was left behind");
  }
}

// The last process makes another call: each that awaits a row of it, or that it awaits one of, fails and says so.
void make_other_call(bool number, uint32_t epoch) {
  const int last = int(processes.size()) - 1;
  uint32_t& differs = number ? processes[last].plan.call.number : processes[last].plan.call.signature;
  ++differs;
  for (Process& p : processes) {
    PeerCall& c = p.plan.call;
    p.s.epoch = epoch, p.s.dead = 0;
    p.control = {}, p.failure = {};
    c.control = &p.control, c.failure = &p.failure;
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) send_rows(c, p.s);
  }
  for (Process& p : processes) {
    const PeerCall& c = p.plan.call;
    for (threadIdx.x = 0; threadIdx.x < 32; ++threadIdx.x) await_bounds(c, p.s);
    bool awaits = false;
    for (int r = 0; r < c.num_ranks; ++r)
      awaits |= c.owner[r] != c.process && (c.owner[r] == last || c.process == last);
    REQUIRE(p.s.dead == awaits, "another call is not noticed");
    if (!awaits) continue;
    const PeerFailure& f = p.failure;
    REQUIRE(f.kind == kPeerDiffers && f.reporter == c.process && (f.process == last) == (c.process != last),
            "another call is not reported");
    REQUIRE((f.number != f.their_number) == number && (f.signature != f.their_signature) == !number,
            "another call is not described");
  }
  --differs;
}

struct Given {
  int64_t begin, end;  // positions, clamped
  std::vector<double> values;
};

// Of integers, 1 to 3. Of floats, NaNs and numbers of both signs and of magnitudes that no fp32 sum holds at once, so
// that its order and precision show (each fits every float dtype).
double value_of(int rank, int64_t i, bool floats) {
  const uint64_t h = (i * 2654435761ull + rank * 40503ull) * 0x9e3779b97f4a7c15ull >> 32;
  if (!floats) return double(1 + h % 3);
  if (h % 61 == 0) return NAN;
  const int exponents[] = {14, 3, -12};
  return std::ldexp(h & 64 ? 1.0 : -1.0, exponents[h / 128 % 3]) * double(1 + h / 512 % 3);
}

// The shards and outputs of process g; rows[r] is set for its ranks.
void make_tensors(int g, std::vector<Given>& rows) {
  Process& p = processes[g];
  PeerCall& c = p.plan.call;
  const bool on_device = read(), floats = int(c.in_dtype) < 4;
  p.shards.resize(c.num_sources), p.outs.resize(c.num_outputs);
  for (int i = 0; i < c.num_sources; ++i) {
    PeerSource& source = c.sources[i];
    const int64_t start = read(), length = read(), capacity = read(), shift = read();
    const int64_t elements = capacity * c.width;
    p.shards[i].resize(elements * c.in_bytes + 64);
    char* data = p.shards[i].data();
    data += -reinterpret_cast<uint64_t>(data) % 16 + shift * c.in_bytes % 16;
    source.data = data, source.capacity = uint32_t(capacity);
    source.start = on_device ? 77 : uint32_t(start), source.length = on_device ? 88 : uint32_t(length);
    p.lengths.push_back(length);
    Given& row = rows[source.rank];
    row.begin = min(max(start, int64_t(0)), c.size);
    row.end = min(row.begin + min(max(length, int64_t(0)), capacity), c.size);
    for (int64_t e = 0; e < elements; ++e) {
      row.values.push_back(value_of(source.rank, e, floats));
      put_element(c.in_dtype, data + e * c.in_bytes, row.values.back());
    }
  }
  if (on_device) c.device_lengths = p.lengths.data(), c.index64 = true;
  for (int q = 0; q < c.num_outputs; ++q) {
    const int64_t shift = read();
    p.outs[q].resize((c.outputs[q].end - c.outputs[q].begin) * c.width * c.out_bytes + 64, 0x55);
    char* out = p.outs[q].data();
    c.outputs[q].data = out + (-reinterpret_cast<uint64_t>(out) % 16 + shift * c.out_bytes % 16);
  }
}

// The elements [first, last) of every output.
void compare(const std::vector<Given>& rows, int64_t first, int64_t last) {
  for (Process& p : processes) {
    const PeerCall& c = p.plan.call;
    for (int q = 0; q < c.num_outputs; ++q) {
      const int64_t begin = c.outputs[q].begin * c.width;
      for (int64_t e = max(begin, first); e < min(c.outputs[q].end * c.width, last); ++e) {
        double sum = 0;
        int count = 0;
        const bool single = int(c.in_dtype) < 3;  // accumulates in fp32
        for (const Given& row : rows) {
          if (e < row.begin * c.width || e >= row.end * c.width) continue;
          sum += row.values[e - row.begin * c.width], ++count;
          if (single) sum = float(sum);  // of two floats in double, rounded: their fp32 sum
        }
        if (c.mean && count > 0) sum = single ? double(float(sum) / float(count)) : sum / count;
        char rounded[16];
        put_element(c.out_dtype, rounded, sum);
        const char* at = static_cast<const char*>(c.outputs[q].data) + (e - begin) * c.out_bytes;
        if (dead_block >= 0 && std::all_of(at, at + c.out_bytes, [](char b) { return b == char(0xff); })) continue;
        const double found = get_element(c.out_dtype, at);
        REQUIRE(std::isnan(sum) ? std::isnan(found) : found == get_element(c.out_dtype, rounded),
                dead_block < 0 ? "a result is not the sum" : "a result is neither the sum nor marked");
      }
    }
  }
}

}  // namespace
}  // namespace shardsum

static void written(char* p, uint4 v) {
  using namespace shardsum;
  const PeerCall& c = call_of(running);
  const uint4 now = *reinterpret_cast<uint4*>(p);
  int to = 0;
  for (; to < c.num_processes; ++to) {
    const char* inboxes = c.base[to] + c.staging_at;
    if (p >= inboxes && p + 16 <= inboxes + 2 * c.staging_bytes) break;
  }
  REQUIRE(to < c.num_processes, "a word outside the inboxes");
  REQUIRE((to == running) == summing, "a word is sent to others, and emptied here");
  const int64_t at = p - (c.base[to] + c.staging_at) - parity_of(processes[running].s.epoch) * c.staging_bytes;
  REQUIRE(at >= 0 && at + 16 <= c.staging_bytes && at % 16 == 0, "a word of the other half");
  bool mine = false;  // a slot of a row that goes from its owner to somebody else
  for (int r = 0; r < c.num_ranks; ++r)
    mine |= at / c.row_bytes == c.slot[r] && (summing ? c.owner[r] != running : c.owner[r] == running);
  REQUIRE(mine, "a word outside its rank's slot");
  if (summing)
    REQUIRE(!is_empty(now), "a word is emptied that has not come");
  else
    REQUIRE(is_empty(now) && !is_empty(v), "a word is sent twice, or empty");
  copy_word(p, &v);
}

// For each case: the number of processes; for each its plan's words, the bytes of its block; then for each whether
// bounds are on the device, of each source start, length, capacity and shift, of each output its shift.
int main() {
  using namespace shardsum;
  int cases = 0;
  for (long long count; std::scanf("%lld", &count) == 1; ++cases) {
    processes = std::vector<Process>(count);
    std::vector<char*> bases;
    for (Process& p : processes) {
      Words words;
      p.plan = read_plan(words);
      p.memory.resize(read() / 16 + 1);
      bases.push_back(reinterpret_cast<char*>(p.memory.data()));
    }
    for (Process& p : processes) {
      PeerCall& c = p.plan.call;
      std::copy(bases.begin(), bases.end(), c.base);
      std::memset(c.base[c.process] + c.staging_at, 0xff, 2 * c.staging_bytes);
    }
    std::vector<Given> rows(processes[0].plan.call.num_ranks);
    for (int g = 0; g < count; ++g) make_tensors(g, rows);
    const PeerCall& c = processes[0].plan.call;
    const int64_t all = c.size * c.width, chunk = processes[0].plan.chunk_elements;
    uint32_t epoch = 7 + cases;
    int64_t begin = 0;
    for (; begin < all; begin += chunk) launch(begin, min(begin + chunk, all), ++epoch);
    compare(rows, 0, all);
    for (Process& p : processes)
      for (auto& out : p.outs) std::fill(out.begin(), out.end(), 0x55);
    dead_block = epoch % c.num_blocks;
    launch(begin - chunk, all, ++epoch);
    compare(rows, begin - chunk, all);
    dead_block = -1;
    for (const bool number : {true, false}) make_other_call(number, ++epoch);
  }
  std::printf("%d cases\n", cases);
}
