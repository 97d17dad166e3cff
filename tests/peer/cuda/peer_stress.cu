// Stress of the peer protocol on one GPU: G processes as concurrent streams over plain device memory, random calls and
// delays, every result compared bit for bit with the emulation kernel. Peers may run ahead as far as the protocol lets
// them: a stream never waits for another, and inputs, results and comparisons are its own.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -fmad=false tests/peer/cuda/peer_stress.cu csrc/cuda/sum_rows.cu -o peer_stress
//   ./peer_stress 100000 [seed [push | write | read | two-shot]]
//
// The last argument keeps to one of the ways in which rows travel. Exit code 0: all equal. Built with
// -DSHARDSUM_PEER_MUTANT=n (1 no parity, 2 flag before data, 3 stale epoch, 4 ranks reversed, 5 nobody compares which
// call a row is of) it must be 1, whatever the way; and of the ways that have it, with 6 (two-shot: sums announced
// before they are written) and 7 (pushing: words are not emptied). Pushed are small sums and, in half of the calls,
// large ones of floats, which are summed while they come. Of those that are written or read in one round half go on
// from accumulators: what the first rows add up to.
#include <cstdint>

namespace shardsum {
__device__ void random_delay(uint32_t epoch, int point);
}
#define SHARDSUM_PEER_POINT(epoch, point) random_delay(epoch, point)

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/peer/enqueue.cu"
#include "../../../csrc/peer/one_shot.cu"
#include "../../../csrc/peer/push.cu"
#include "../../../csrc/peer/stream.cu"
#include "../../../csrc/peer/two_shot.cu"

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t error = cudaError_t(call);                                            \
    if (error != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(2);                                                                         \
    }                                                                                       \
  } while (0)

namespace shardsum {

__device__ uint32_t mix(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
__device__ void spin_ns(uint32_t ns) {
  const uint64_t begin = now_ns();
  while (now_ns() - begin < ns) {
  }
}
__device__ void random_delay(uint32_t epoch, int point) {
  const uint32_t h = mix(uint32_t(now_ns()) ^ mix(epoch * 8 + point) ^ (blockIdx.x * 2654435761u));
  if (threadIdx.x % 32 == 0 && h % 16 == 0) spin_ns(mix(h) % 6000);
  __syncwarp();
}

namespace {

using Random = std::mt19937_64;
int64_t pick(Random& random, int64_t lo, int64_t hi) { return lo + int64_t(random() % uint64_t(hi - lo + 1)); }

constexpr int64_t kPoolBytes = 1 << 20;    // random input of one virtual rank
constexpr int64_t kSlotBytes = 192 << 10;  // staging of one row
constexpr int64_t kReducedBytes = 512 << 10;
constexpr int64_t kInboxRowBytes = kSlotBytes / 3 * 4 + 2048;
constexpr int64_t kOutBytes = 1 << 20;
constexpr int kMaxBlocks = 16;

__global__ void delay_kernel(uint32_t ns) { spin_ns(ns); }
__global__ void fill_random(uint32_t* p, int64_t n, uint32_t seed, DType dtype) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t h = mix(uint32_t(i) ^ seed);
    // Floats of mixed sign within 2^+-8 of 1: sums in another order or precision round differently.
    if (dtype == DType::kFloat32) h = (h & 0x80ffffffu) | ((120 + mix(h) % 16) << 23);
    if (dtype == DType::kBFloat16) {
      const uint32_t lo = (h & 0x807f) | ((120 + mix(h) % 16) << 7),
                     up = ((h >> 16) & 0x807f) | ((120 + mix(h + 1) % 16) << 7);
      h = lo | (up << 16);
    }
    if (mix(h) % 256 == 0) h = ~0u;  // NaNs that look like empty words
    p[i] = h;
  }
}
// Counts words that differ and poisons the result.
__global__ void compare(const uint8_t* expected, uint8_t* got, int64_t bytes, unsigned long long* wrong, uint64_t call,
                        unsigned long long* first_call) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < bytes; i += int64_t(gridDim.x) * blockDim.x) {
    if (expected[i] != got[i]) {
      atomicAdd(wrong, 1ull);
      atomicMin(first_call, (unsigned long long)(call));
    }
    got[i] = 0xee;
  }
}

struct Placement {
  int ranks, processes;
  std::vector<int> owner;
};

// One call, as all processes agree on it.
struct Config {
  DType in, out;
  bool move = false, two_shot = false, push = false, write = false, mean = false, scaled = false,
       device_lengths = false;
  int64_t size = 0, width = 1;
  std::vector<int64_t> start, length, offset;     // by rank; offset of its data in the pool, in bytes
  std::vector<std::pair<int64_t, int64_t>> outs;  // by process
  int64_t chunk_elements = 0;
  int64_t out_shift = 0;  // bytes that results lie off their alignment
  int columns = 1, stretches = 1, tiles_per_piece = 1, blocks = 1, threads = 128, producers = 1;
  int folded = 0;                   // rows that accumulators hold already
  uint8_t* accumulators = nullptr;  // of them, for the whole range
  uint8_t* expected = nullptr;
  int64_t* lengths_on_device = nullptr;  // by rank
};

struct Process {
  cudaStream_t stream;
  char* block;
  PeerControl* control;
  PeerFailure* failure;
  uint8_t* out;
};

struct World {
  Placement place;
  std::vector<Process> processes;
  std::vector<uint8_t*> pools;  // by rank: bf16 bits
  std::vector<uint8_t*> float_pools;
  std::vector<Config> configs;
  unsigned long long* wrong;  // [0] differing bytes, [1] first call
  int64_t stages_at, abort_at, staging_at, reduced_at, inbox_at, staging_bytes;
  std::vector<int> place_of;  // each rank's among its owner's
  int hosted = 0;             // most ranks on a process
  std::string way;            // "": all
};

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

World make_world(const Placement& place, uint32_t first_epoch, const std::string& way) {
  World w{place};
  w.way = way;
  std::vector<int> used(place.processes);
  for (int r = 0; r < place.ranks; ++r) w.place_of.push_back(used[place.owner[r]]++);
  w.hosted = *std::max_element(used.begin(), used.end());
  w.stages_at = 2ll * kMaxBlocks * place.ranks * sizeof(RowFlag);
  w.abort_at = w.stages_at + 2ll * kMaxBlocks * place.processes * sizeof(StageFlag);
  w.staging_at = round_up(w.abort_at + 8 * (1 + place.processes), 256);
  w.staging_bytes = place.ranks * kSlotBytes;  // a slot for every rank
  w.reduced_at = w.staging_at + 2 * w.staging_bytes;
  w.inbox_at = w.reduced_at + 2 * kReducedBytes;
  const int64_t total = w.inbox_at + 2 * place.ranks * kInboxRowBytes;
  for (int g = 0; g < place.processes; ++g) {
    Process p{};
    CHECK(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    CHECK(cudaMalloc(&p.block, total));
    CHECK(cudaMemset(p.block, 0, w.inbox_at));
    CHECK(cudaMemset(p.block + w.inbox_at, 0xff, total - w.inbox_at));
    CHECK(cudaMalloc(&p.control, sizeof(PeerControl)));
    const PeerControl control{first_epoch, 0, 0, 0};
    CHECK(cudaMemcpy(p.control, &control, sizeof(control), cudaMemcpyHostToDevice));
    CHECK(cudaMallocHost(&p.failure, sizeof(PeerFailure)));
    std::memset(p.failure, 0, sizeof(PeerFailure));
    CHECK(cudaMalloc(&p.out, kOutBytes));
    CHECK(cudaMemset(p.out, 0xee, kOutBytes));
    w.processes.push_back(p);
  }
  for (int r = 0; r < place.ranks; ++r) {
    uint8_t *a, *b;
    CHECK(cudaMalloc(&a, kPoolBytes));
    CHECK(cudaMalloc(&b, kPoolBytes));
    fill_random<<<64, 256>>>(reinterpret_cast<uint32_t*>(a), kPoolBytes / 4, 77 + r, DType::kBFloat16);
    fill_random<<<64, 256>>>(reinterpret_cast<uint32_t*>(b), kPoolBytes / 4, 7700 + r, DType::kFloat32);
    w.pools.push_back(a);
    w.float_pools.push_back(b);
  }
  CHECK(cudaMalloc(&w.wrong, 2 * sizeof(*w.wrong)));
  const unsigned long long zero[2] = {0, ~0ull};
  CHECK(cudaMemcpy(w.wrong, zero, sizeof(zero), cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
  return w;
}

const uint8_t* pool_of(const World& w, const Config& c, int rank) {
  return (c.in == DType::kFloat32 ? w.float_pools : w.pools)[rank];
}

int64_t accumulator_bytes(const Config& c) { return c.out == DType::kInt64 ? 8 : 4; }

Config make_config(const World& w, Random& random) {
  const int R = w.place.ranks, G = w.place.processes;
  Config c;
  const DType pairs[][2] = {{DType::kBFloat16, DType::kBFloat16}, {DType::kBFloat16, DType::kFloat32},
                            {DType::kFloat32, DType::kFloat32},   {DType::kFloat32, DType::kBFloat16},
                            {DType::kInt16, DType::kInt64},       {DType::kUInt8, DType::kInt64},
                            {DType::kUInt8, DType::kUInt8}};
  const int which = int(pick(random, 0, 9));
  const auto& pair = pairs[which < 7 ? which : which - 7];
  c.in = pair[0], c.out = pair[1];
  c.move = c.in == DType::kUInt8 && c.out == DType::kUInt8;
  const bool integer = c.out == DType::kInt64;
  const int64_t in_bytes = element_size(c.in), out_bytes = element_size(c.out);
  const int64_t widths[] = {1, 3, 8, 16, 100, 512};
  c.width = widths[pick(random, 0, 5)];
  const int64_t most = std::min<int64_t>(pick(random, 0, 3) ? 4096 : 24000, kSlotBytes / in_bytes / 2);
  c.size = std::max<int64_t>(1, pick(random, 1, most) / c.width);
  const char* ways[] = {"push", "write", "read", "two-shot"};
  const std::string way = w.way.empty() ? ways[pick(random, 0, 3)] : w.way;
  c.push = way == "push" && !c.move && in_bytes > 1;
  c.two_shot = way == "two-shot" && !c.move;
  c.write = way == "write" || c.two_shot;
  c.mean = !integer && !c.move && pick(random, 0, 3) == 0;
  c.scaled = !integer && !c.move && pick(random, 0, 3) == 0;
  c.device_lengths = !c.move && pick(random, 0, 2) == 0;  // rows start at 0 then
  const int shape = int(pick(random, 0, 3));
  for (int r = 0; r < R; ++r) {
    int64_t begin = 0, length = shape == 0 ? c.size : pick(random, 0, c.size);
    if (shape == 3 && !c.device_lengths) begin = pick(random, 0, c.size - length);
    if (c.move) begin = c.size * r / R, length = c.size * (r + 1) / R - begin;
    c.start.push_back(begin);
    c.length.push_back(length);
    c.offset.push_back(pick(random, 0, 3) ? pick(random, 0, 100) * 16 : pick(random, 0, 800) * in_bytes);
  }
  if (!c.move && !c.push && !c.two_shot && pick(random, 0, 1)) {
    c.folded = int(pick(random, 1, R - 1));
    c.device_lengths = false;
    c.mean = c.mean && shape == 0;  // accumulators of one count
  }
  c.out_shift = pick(random, 0, 3) ? 0 : pick(random, 1, 7) * out_bytes;
  const bool scatter = !c.two_shot && pick(random, 0, 2) == 0;
  for (int g = 0; g < G; ++g) {
    if (scatter)
      c.outs.push_back({c.size * g / G, c.size * (g + 1) / G});
    else
      c.outs.push_back({0, c.size});
  }
  const int64_t vector = c.move ? 16 : in_bytes == 1 ? 8 : 16 / in_bytes;
  const int columns[] = {1, 2, 4, 8};
  c.columns = columns[pick(random, 0, 3)];
  c.stretches = int(pick(random, 1, 3)) * (c.two_shot ? G : 1);
  const int64_t stretch = c.columns * 32 * vector, tile = stretch * c.stretches;
  c.tiles_per_piece = int(pick(random, 1, 3));
  const int blocks[] = {1, 2, 5, kMaxBlocks};
  c.blocks = int(std::min<int64_t>(blocks[pick(random, 0, 3)], (c.size * c.width + tile - 1) / tile));
  c.threads = pick(random, 0, 1) ? 256 : c.two_shot ? 96 : c.write ? 192 : 128;
  c.producers = int(!c.push ? pick(random, 1, 2) : integer ? 0 : pick(random, 0, 5));
  c.chunk_elements = pick(random, 0, 3) ? c.size * c.width : round_up((c.size * c.width + 1) / 2, 16);
  // What the emulation says of the whole range; each process has its part.
  const int64_t flat = c.size * c.width;
  CHECK(cudaMalloc(&c.expected, flat * out_bytes + 16));
  if (c.move) {
    for (int r = 0; r < R; ++r)
      CHECK(cudaMemcpy(c.expected + c.start[r] * c.width, pool_of(w, c, r) + c.offset[r], c.length[r] * c.width,
                       cudaMemcpyDeviceToDevice));
  } else {
    SumArgs args{c.in, c.out, R, c.size, c.width, c.expected};
    args.finish.mean = c.mean;
    args.finish.has_scale = c.scaled;
    args.finish.scale = 1.0 / 3;
    std::vector<Row> rows;
    for (int r = 0; r < R; ++r)
      rows.push_back({pool_of(w, c, r) + c.offset[r], c.start[r] * c.width, (c.start[r] + c.length[r]) * c.width});
    CHECK(sum_rows_cuda(args, rows.data(), nullptr, nullptr));
    if (c.folded > 0) {
      CHECK(cudaMalloc(&c.accumulators, flat * accumulator_bytes(c)));
      const SumArgs begun{c.in, integer ? DType::kInt64 : DType::kFloat32, c.folded, c.size, c.width, c.accumulators};
      CHECK(sum_rows_cuda(begun, rows.data(), nullptr, nullptr));
    }
  }
  CHECK(cudaMalloc(&c.lengths_on_device, R * sizeof(int64_t)));
  std::vector<int64_t> lengths;  // in the order of processes and slots
  for (int g = 0; g < G; ++g)
    for (int r = 0; r < R; ++r)
      if (w.place.owner[r] == g) lengths.push_back(c.length[r]);
  CHECK(cudaMemcpy(c.lengths_on_device, lengths.data(), R * sizeof(int64_t), cudaMemcpyHostToDevice));
  CHECK(cudaDeviceSynchronize());
  return c;
}

PeerCall describe(const World& w, const Config& c, int g, int64_t timeout_ns) {
  PeerCall call{};
  const int R = w.place.ranks, G = w.place.processes;
  const Process& p = w.processes[g];
  call.num_ranks = call.flag_ranks = R, call.num_processes = G, call.process = g;
  call.in_dtype = c.in, call.out_dtype = c.out;
  call.move = c.move, call.two_shot = c.two_shot, call.push = c.push, call.mean = c.mean, call.has_scale = c.scaled,
  call.scale = 1.0 / 3;
  call.number = 7, call.signature = 77;
  call.size = c.size, call.width = c.width;
  call.in_bytes = int(element_size(c.in)), call.out_bytes = int(element_size(c.out));
  const int vector = c.move ? 16 : call.in_bytes == 1 ? 8 : 16 / call.in_bytes;
  call.warp_columns = c.columns;
  call.stretch_elements = c.columns * 32 * vector;
  call.stretches_per_tile = c.stretches;
  call.tile_elements = call.stretch_elements * c.stretches;
  call.tiles_per_piece = c.tiles_per_piece;
  call.num_blocks = c.blocks, call.max_blocks = kMaxBlocks;
  call.num_threads = c.threads, call.producer_warps = c.producers, call.write = c.write;
  for (int q = 0; q < G; ++q) call.base[q] = w.processes[q].block;
  call.stages_at = w.stages_at, call.abort_at = w.abort_at, call.staging_at = w.staging_at;
  call.reduced_at = w.reduced_at, call.staging_bytes = w.staging_bytes, call.row_bytes = kSlotBytes;
  if (c.two_shot) {  // slots as tight as may be
    const int64_t tiles = (c.chunk_elements + call.tile_elements - 1) / call.tile_elements;
    call.row_bytes = round_up(tiles * (call.tile_elements / G) * call.in_bytes, 16);
  }
  call.reduced_bytes = kReducedBytes;
  if (c.push) {
    call.staging_at = w.inbox_at, call.row_bytes = kInboxRowBytes, call.staging_bytes = R * kInboxRowBytes;
  }
  for (int r = 0; r < R; ++r) call.owner[r] = uint8_t(w.place.owner[r]), call.slot[r] = uint8_t(r);
  for (int r = 0; r < R; ++r) {
    call.place[r] = uint8_t(w.place_of[r]);
    // What other processes read of a row: the hull of their outputs.
    int64_t begin = c.size, end = 0;
    for (int q = 0; q < G; ++q)
      if (q != w.place.owner[r]) begin = std::min(begin, c.outs[q].first), end = std::max(end, c.outs[q].second);
    call.need_begin[r] = uint32_t(std::min(begin, end)), call.need_end[r] = uint32_t(end);
  }
  call.control = p.control, call.failure = p.failure, call.timeout_ns = timeout_ns;
  int first = 0;
  for (int r = 0; r < R; ++r) first += w.place.owner[r] < g;
  if (c.device_lengths) {
    call.device_lengths = c.lengths_on_device + first;
    call.index64 = true;
  }
  for (int r = 0; r < R; ++r) {
    if (w.place.owner[r] != g) continue;
    PeerSource& s = call.sources[call.num_sources++];
    s.rank = r;
    s.data = reinterpret_cast<const char*>(pool_of(w, c, r) + c.offset[r]);
    s.start = uint32_t(c.start[r]), s.length = s.capacity = uint32_t(c.length[r]);
    if (c.device_lengths) s.start = 0xdead, s.length = 0xbeef;
    if (r < c.folded) s.start = s.length = 0;
  }
  if (c.folded > 0 && c.outs[g].first < c.outs[g].second)
    call.accumulators = c.accumulators + c.outs[g].first * c.width * accumulator_bytes(c), call.carried = c.folded;
  call.num_outputs = 1;
  call.outputs[0] = {p.out + c.out_shift, uint32_t(c.outs[g].first), uint32_t(c.outs[g].second)};
  return call;
}

void enqueue(World& w, const Config& c, int g, uint64_t number, Random& random, int64_t timeout_ns) {
  Process& p = w.processes[g];
  if (pick(random, 0, 7) == 0) delay_kernel<<<1, 1, 0, p.stream>>>(uint32_t(pick(random, 0, 40000)));
  PeerCall call = describe(w, c, g, timeout_ns);
  call.overlaps = pick(random, 0, 1);
  const int64_t flat = c.size * c.width;
  for (int64_t begin = 0; begin < flat; begin += c.chunk_elements) {
    call.chunk_begin = begin, call.chunk_end = std::min(begin + c.chunk_elements, flat);
    CHECK(peer_launch(call, p.stream));
  }
  const int64_t out_bytes = element_size(c.out) * c.width, from = c.outs[g].first, to = c.outs[g].second;
  if (to > from)
    compare<<<8, 256, 0, p.stream>>>(c.expected + from * out_bytes, p.out + c.out_shift, (to - from) * out_bytes,
                                     w.wrong, number, w.wrong + 1);
}

bool report(const World& w, const char* name, int64_t calls) {
  CHECK(cudaDeviceSynchronize());
  unsigned long long wrong[2];
  CHECK(cudaMemcpy(wrong, w.wrong, sizeof(wrong), cudaMemcpyDeviceToHost));
  bool failed = wrong[0] != 0;
  std::printf("%s: R=%d G=%d, %lld calls: %llu bytes differ", name, w.place.ranks, w.place.processes, (long long)calls,
              wrong[0]);
  if (wrong[0]) std::printf(" (first in call %llu)", wrong[1]);
  for (size_t g = 0; g < w.processes.size(); ++g) {
    const PeerFailure& f = *w.processes[g].failure;
    if (f.kind == 0) continue;
    failed = true;
    std::printf("\n  process %zu failed: kind %lld, process %lld, block %lld, epoch %lld, reporter %lld", g,
                (long long)f.kind, (long long)f.process, (long long)f.block, (long long)f.epoch, (long long)f.reporter);
  }
  std::printf("\n");
  return !failed;
}

bool stress(const Placement& place, int64_t calls, uint64_t seed, const std::string& way) {
  Random random(seed);
  World w = make_world(place, 0xffffffffu - 500, way);  // the epoch wraps early
  for (int i = 0; i < 256; ++i) w.configs.push_back(make_config(w, random));
  std::vector<int> order(place.processes);
  for (int g = 0; g < place.processes; ++g) order[g] = g;
  for (int64_t i = 0; i < calls; ++i) {
    const Config& c = w.configs[random() % w.configs.size()];
    std::shuffle(order.begin(), order.end(), random);
    for (const int g : order) enqueue(w, c, g, i, random, 2'000'000'000);
    if (i % 1024 == 1023) {
      bool dead = false;
      for (const Process& p : w.processes) dead |= p.failure->kind != 0;
      if (dead) break;
    }
  }
  return report(w, "stress", calls);
}

// An all_reduce that goes in one launch, of the way `way`.
Config simple_config(const World& w, Random& random, const std::string& way) {
  Config c;
  do c = make_config(w, random);
  while (c.move || c.size * c.width * element_size(c.out) < 4096 || c.outs[0].second - c.outs[0].first != c.size ||
         c.chunk_elements != c.size * c.width || c.push != (way == "push"));
  c.out_shift = 0;
  return c;
}

// Whether process g's result is marked as invalid, all of it; poisons it.
bool is_invalid(const World& w, const Config& c, int g) {
  std::vector<uint8_t> out(c.size * c.width * element_size(c.out));
  CHECK(cudaMemcpy(out.data(), w.processes[g].out, out.size(), cudaMemcpyDeviceToHost));
  CHECK(cudaMemset(w.processes[g].out, 0xee, kOutBytes));
  return std::all_of(out.begin(), out.end(), [](uint8_t b) { return b == 0xff; });
}

// Process G-1 does not come; it does later, when the others have given up.
bool absent_peer(const Placement& place, const std::string& way) {
  Random random(3);
  World w = make_world(place, 0, way);
  const Config c = simple_config(w, random, way);
  const int last = place.processes - 1;
  bool good = true;
  auto launch = [&](int g) {
    PeerCall call = describe(w, c, g, 20'000'000);
    call.chunk_end = c.size * c.width;
    CHECK(peer_launch(call, w.processes[g].stream));
  };
  for (int round = 0; round < 3; ++round) {  // the second and third exit at once
    for (int g = 0; g < last; ++g) launch(g);
    if (round == 1) launch(last);
    CHECK(cudaDeviceSynchronize());
    for (int g = 0; g < last + (round == 1); ++g) {
      const PeerFailure& f = *w.processes[g].failure;
      good &= is_invalid(w, c, g) && f.kind == kPeerAbsent && f.process == last && f.epoch == 1;
      if (g == last) good &= f.reporter != last;
    }
  }
  const PeerFailure& f = *w.processes[0].failure;
  std::printf("absent peer, %s: R=%d G=%d: %s (kind %lld, process %lld, block %lld, epoch %lld)\n", way.c_str(),
              place.ranks, place.processes, good ? "as it should" : "WRONG", (long long)f.kind, (long long)f.process,
              (long long)f.block, (long long)f.epoch);
  return good;
}

// Process G-1 is in a call of another number, or of another signature: all fail, nobody gets a sum.
bool other_call(const Placement& place, const std::string& way) {
  bool good = true;
  for (const bool number : {true, false}) {
    Random random(4);
    World w = make_world(place, 0, way);
    const Config c = simple_config(w, random, way);
    for (int g = 0; g < place.processes; ++g) {
      PeerCall call = describe(w, c, g, 2'000'000'000);
      call.chunk_end = c.size * c.width;
      if (g == place.processes - 1) ++(number ? call.number : call.signature);
      CHECK(peer_launch(call, w.processes[g].stream));
    }
    CHECK(cudaDeviceSynchronize());
    for (int g = 0; g < place.processes; ++g) {
      const PeerFailure& f = *w.processes[g].failure;
      good &= is_invalid(w, c, g) && f.kind == kPeerDiffers && f.epoch == 1;
      if (f.reporter == g) good &= (number ? f.number != f.their_number : f.signature != f.their_signature);
    }
  }
  std::printf("other call, %s: R=%d G=%d: %s\n", way.c_str(), place.ranks, place.processes,
              good ? "as it should" : "WRONG");
  return good;
}

}  // namespace
}  // namespace shardsum

int main(int argc, char** argv) {
  using shardsum::Placement;
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 2000;
  const uint64_t seed = argc > 2 ? std::atoll(argv[2]) : 1;
  const std::string way = argc > 3 ? argv[3] : "";
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // streams that wait for each other need queues of their own
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);       // a kernel that is loaded while others wait for it stops them all
  bool good = shardsum::stress(Placement{8, 8, {0, 1, 2, 3, 4, 5, 6, 7}}, calls, seed, way);
  good &= shardsum::stress(Placement{4, 4, {0, 1, 2, 3}}, calls, seed + 1, way);
  good &= shardsum::stress(Placement{2, 2, {0, 1}}, calls / 2, seed + 4, way);
  for (const char* one : {"push", "write", "read", "two-shot"})
    if (way.empty() || way == one) good &= shardsum::other_call(Placement{4, 4, {0, 1, 2, 3}}, one);
#ifndef SHARDSUM_PEER_MUTANT
  good &= shardsum::stress(Placement{8, 4, {0, 1, 2, 3, 3, 2, 1, 0}}, calls / 4, seed + 2, way);
  good &= shardsum::stress(Placement{5, 2, {0, 0, 0, 1, 1}}, calls / 4, seed + 3, way);
  for (const char* one : {"push", "write", "read", "two-shot"})
    good &= shardsum::absent_peer(Placement{4, 4, {0, 1, 2, 3}}, one);
#endif
  std::printf(good ? "all equal\n" : "NOT equal\n");
  return good ? 0 : 1;
}
