// Times of calls over peer memory: two processes' launches from one program, on two GPUs or on one.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -fmad=false benchmarks/cuda/peer_time.cu -o peer_time
//   ./peer_time way=push,bytes=65536,producers=0 way=write,bytes=16777216,columns=8,stretches=4,first=50,second=50 ...
//   ... -DTRACE: also the cycles from the start of a block to the points of the kernel (block 0, mean over launches)
//
// bf16, R = G = 2, CUDA graphs of many calls over rotating buffers, the slower GPU; every variant is verified. Options:
// way (copy: read by the peer after copying in; push; write; read, store: plain loads from or stores to
// the peer, the link's own rate; empty: a kernel that does nothing), bytes, threads, blocks, columns (vectors a lane),
// stretches (a tile), tiles (a piece, 0: all), producers (of push: 0 pushes, then sums), overlap (of launches), first,
// second (percent of positions that each process holds).
#include <cstdint>

#ifdef TRACE
namespace shardsum {
__device__ unsigned long long trace_sum[8][16];
__device__ unsigned int trace_count[8][16];
__device__ long long trace_start[16];
__device__ inline void trace(int point) {
  if (blockIdx.x != 0 || threadIdx.x % 32 != 0) return;
  const int warp = threadIdx.x / 32;
  const long long now = clock64();
  if (point == 6) trace_start[warp] = now;
  trace_sum[point][warp] += now - trace_start[warp];
  trace_count[point][warp] += 1;
}
}  // namespace shardsum
#define SHARDSUM_PEER_POINT(epoch, point) trace(point)
#endif

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../../csrc/peer/enqueue.cu"
#include "../../csrc/peer/one_shot.cu"
#include "../../csrc/peer/push.cu"
#include "../../csrc/peer/stream.cu"
#include "../../csrc/peer/two_shot.cu"

#define CHECK(call)                                                                         \
  do {                                                                                      \
    const cudaError_t error = cudaError_t(call);                                            \
    if (error != cudaSuccess) {                                                             \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error)); \
      std::exit(2);                                                                         \
    }                                                                                       \
  } while (0)

namespace shardsum {
namespace {

constexpr int kMaxBlocks = 132, kBuffers = 3;
constexpr int64_t kMost = 64 << 20;

struct Process {
  int device;
  cudaStream_t stream;
  char *block, *input, *output;
  PeerControl* control;
  PeerFailure* failure;
};

struct Variant {
  std::string way = "copy";
  int64_t bytes = 1 << 20;
  int threads = 256, blocks = 128, columns = 4, stretches = 16, tiles = 1, producers = 2, overlap = 0;
  int first = 100, second = 100;
  bool is(const char* name) const { return way == name; }
  uint32_t length(int g) const { return uint32_t(bytes / 2 * (g == 0 ? first : second) / 100) / 8 * 8; }
};

int64_t stages_at() { return 2ll * kMaxBlocks * 2 * sizeof(RowFlag); }
int64_t abort_at() { return stages_at() + 2ll * kMaxBlocks * 2 * sizeof(StageFlag); }
int64_t staging_at() { return abort_at() + 256; }
int64_t inbox_at() { return staging_at() + 2 * 2 * (kMost + 256); }

__global__ void fill(uint32_t* p, int64_t n, uint32_t seed) {  // bf16 within 2^+-8 of 1
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint32_t h = uint32_t(i) * 2654435761u + seed;
    h ^= h >> 15, h *= 0x846ca68bu, h ^= h >> 16;
    p[i] = (h & 0x807f807fu) | ((120 + h % 16) << 7) | ((120 + (h >> 8) % 16) << 23);
  }
}
__global__ void check(const __nv_bfloat16* a, uint32_t in_a, const __nv_bfloat16* b, uint32_t in_b,
                      const __nv_bfloat16* out, int64_t n, unsigned* wrong) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    float sum = 0;
    if (i < in_a) sum = __fadd_rn(sum, __bfloat162float(a[i]));
    if (i < in_b) sum = __fadd_rn(sum, __bfloat162float(b[i]));
    if (__bfloat16_as_ushort(__float2bfloat16_rn(sum)) != __bfloat16_as_ushort(out[i])) atomicAdd(wrong, 1u);
  }
}
__global__ void __launch_bounds__(256, 2) plain_copy(char* to, const char* from, int64_t bytes, bool reads) {
  const Worker worker{int(blockIdx.x * 8 + warp_index()), int(gridDim.x * 8)};
  if (reads)
    copy_whole<true>(to, from, int(bytes), worker);
  else
    copy_whole<false>(to, from, int(bytes), worker);
}
__global__ void empty_kernel(const __grid_constant__ PeerCall call) {
  await_previous_kernel();
  let_next_begin();
}

std::vector<Process> make() {
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  std::vector<Process> all;
  for (int g = 0; g < 2; ++g) {
    Process p{g % devices};
    CHECK(cudaSetDevice(p.device));
    if (devices > 1) CHECK(cudaDeviceEnablePeerAccess(1 - g, 0));
    CHECK(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    const int64_t total = inbox_at() + 2 * 2 * (kMost + 256);
    CHECK(cudaMalloc(&p.block, total));
    CHECK(cudaMemset(p.block, 0, inbox_at()));
    CHECK(cudaMemset(p.block + inbox_at(), 0xff, total - inbox_at()));
    CHECK(cudaMalloc(&p.input, kBuffers * kMost));
    CHECK(cudaMalloc(&p.output, kBuffers * kMost));
    fill<<<512, 256>>>(reinterpret_cast<uint32_t*>(p.input), kBuffers * kMost / 4, 99 + g);
    CHECK(cudaMalloc(&p.control, sizeof(PeerControl)));
    CHECK(cudaMemset(p.control, 0, sizeof(PeerControl)));
    CHECK(cudaMallocHost(&p.failure, sizeof(PeerFailure)));
    std::memset(p.failure, 0, sizeof(PeerFailure));
    all.push_back(p);
  }
  for (Process& p : all) {
    CHECK(cudaSetDevice(p.device));
    CHECK(cudaDeviceSynchronize());
  }
  return all;
}

PeerCall describe_call(const std::vector<Process>& all, int g, const Variant& v, int buffer) {
  const Process& p = all[g];
  PeerCall c{};
  c.num_ranks = c.flag_ranks = c.num_processes = 2;
  c.process = g, c.num_sources = c.num_outputs = 1;
  c.in_dtype = c.out_dtype = DType::kBFloat16, c.in_bytes = c.out_bytes = 2;
  c.size = v.bytes / 2, c.width = 1;
  c.chunk_end = c.size;
  const bool push = v.is("push");
  c.warp_columns = push ? 4 : v.columns, c.stretches_per_tile = push ? 1 : v.stretches;
  c.stretch_elements = c.warp_columns * 32 * 8;
  c.tile_elements = c.stretch_elements * c.stretches_per_tile;
  const int64_t tiles = (c.size + c.tile_elements - 1) / c.tile_elements;
  c.num_blocks = int(std::min<int64_t>(v.blocks, tiles)), c.max_blocks = kMaxBlocks;
  c.tiles_per_piece = v.tiles && !push ? v.tiles : int((tiles + c.num_blocks - 1) / c.num_blocks);
  c.num_threads = v.threads, c.producer_warps = v.producers, c.write = v.is("write");
  for (int q = 0; q < 2; ++q)
    c.base[q] = all[q].block, c.owner[q] = c.slot[q] = uint8_t(q), c.need_end[q] = uint32_t(c.size);
  c.stages_at = stages_at(), c.abort_at = abort_at(), c.staging_at = push ? inbox_at() : staging_at();
  c.row_bytes = kMost + 256, c.staging_bytes = 2 * c.row_bytes;
  c.control = p.control, c.failure = p.failure, c.timeout_ns = 2'000'000'000;
  c.push = push, c.overlaps = v.overlap != 0;
  PeerSource& s = c.sources[0];
  s.data = p.input + buffer * kMost;
  s.rank = g, s.length = s.capacity = v.length(g);
  c.outputs[0] = {p.output + buffer * kMost, 0, uint32_t(c.size)};
  return c;
}

void enqueue(const std::vector<Process>& all, int g, const Variant& v, int i) {
  PeerCall c = describe_call(all, g, v, i % kBuffers);
  const Process &p = all[g], &peer = all[1 - g];
  const int64_t at = i % kBuffers * kMost;
  if (v.is("empty")) {
    c.num_blocks = v.blocks;
    CHECK(launch_peer_kernel(empty_kernel, c, v.threads, 0, p.stream));
  } else if (v.is("read") || v.is("store")) {
    const bool reads = v.is("read");
    plain_copy<<<v.blocks, 256, 0, p.stream>>>((reads ? p : peer).output + at, (reads ? peer : p).input + at, v.bytes,
                                               reads);
    CHECK(cudaGetLastError());
  } else {
    CHECK(peer_launch(c, p.stream));
  }
}

bool sums(const Variant& v) { return !v.is("empty") && !v.is("read") && !v.is("store"); }

// Elements that differ from the sum, over two rounds of all buffers.
unsigned verify(const std::vector<Process>& all, const Variant& v) {
  unsigned* wrong;
  CHECK(cudaMallocManaged(&wrong, sizeof(unsigned)));
  *wrong = 0;
  for (int g = 0; g < 2; ++g) {
    CHECK(cudaSetDevice(all[g].device));
    CHECK(cudaMemset(all[g].output, 0xff, kBuffers * kMost));
    CHECK(cudaDeviceSynchronize());
  }
  for (int i = 0; i < 2 * kBuffers; ++i) {
    for (int g = 0; g < 2; ++g) {
      CHECK(cudaSetDevice(all[g].device));
      Variant eager = v;
      eager.overlap = 0;
      enqueue(all, g, eager, i);
    }
  }
  for (int g = 0; g < 2; ++g) {
    CHECK(cudaSetDevice(all[g].device));
    CHECK(cudaStreamSynchronize(all[g].stream));
    for (int b = 0; b < kBuffers; ++b) {
      auto at = [&](char* p) { return reinterpret_cast<__nv_bfloat16*>(p + b * kMost); };
      check<<<512, 256>>>(at(all[0].input), v.length(0), at(all[1].input), v.length(1), at(all[g].output), v.bytes / 2,
                          wrong);
    }
    CHECK(cudaDeviceSynchronize());
    if (all[g].failure->kind != 0) std::printf("FAILED\n"), std::exit(1);
  }
  const unsigned found = *wrong;
  CHECK(cudaFree(wrong));
  return found;
}

double microseconds(const std::vector<Process>& all, const Variant& v) {
  cudaGraphExec_t graphs[2];
  cudaEvent_t begin[2], end[2];
  const int n = v.bytes >= kMost ? 6 : v.bytes > (8 << 20) ? 12 : 60;
  for (int g = 0; g < 2; ++g) {
    CHECK(cudaSetDevice(all[g].device));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(all[g].stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n; ++i) {
      Variant w = v;
      if (i == 0) w.overlap = 0;
      enqueue(all, g, w, i);
    }
    CHECK(cudaStreamEndCapture(all[g].stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[g], graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventCreate(&begin[g]));
    CHECK(cudaEventCreate(&end[g]));
  }
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    for (int step = 0; step < 2; ++step) {
      for (int g = 0; g < 2; ++g) {
        CHECK(cudaSetDevice(all[g].device));
        if (step == 1) CHECK(cudaEventRecord(begin[g], all[g].stream));
        CHECK(cudaGraphLaunch(graphs[g], all[g].stream));
        if (step == 1) CHECK(cudaEventRecord(end[g], all[g].stream));
      }
    }
    float worst = 0;
    for (int g = 0; g < 2; ++g) {
      float ms = 0;
      CHECK(cudaSetDevice(all[g].device));
      CHECK(cudaEventSynchronize(end[g]));
      CHECK(cudaEventElapsedTime(&ms, begin[g], end[g]));
      worst = std::max(worst, ms);
      if (all[g].failure->kind != 0) std::printf("FAILED\n"), std::exit(1);
    }
    if (i > 1) times.push_back(worst * 1e3f / n);
  }
  for (int g = 0; g < 2; ++g) CHECK(cudaGraphExecDestroy(graphs[g]));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

#ifdef TRACE
void clear_trace(const std::vector<Process>& all) {
  const std::vector<char> zeros(sizeof(trace_sum));
  CHECK(cudaSetDevice(all[0].device));
  CHECK(cudaMemcpyToSymbol(trace_sum, zeros.data(), sizeof(trace_sum)));
  CHECK(cudaMemcpyToSymbol(trace_count, zeros.data(), sizeof(trace_count)));
}
void print_trace(const std::vector<Process>& all) {
  unsigned long long sum[8][16];
  unsigned int count[8][16];
  CHECK(cudaSetDevice(all[0].device));
  CHECK(cudaMemcpyFromSymbol(sum, trace_sum, sizeof(sum)));
  CHECK(cudaMemcpyFromSymbol(count, trace_count, sizeof(count)));
  const char* points[] = {"set up", "copied", "waited", "read", "met", "", "start", ""};
  for (const int point : {0, 1, 4, 2, 3}) {
    std::printf(" %s", points[point]);
    for (int w = 0; w < 8; ++w)
      if (count[point][w]) std::printf(" %llu", sum[point][w] / count[point][w]);
    std::printf(";");
  }
}
#endif

Variant parse(const std::string& text) {
  Variant v;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size()), equals = text.find('=', at);
    const std::string key = text.substr(at, equals - at), value = text.substr(equals + 1, end - equals - 1);
    const int number = std::atoi(value.c_str());
    if (key == "way")
      v.way = value;
    else if (key == "bytes")
      v.bytes = std::atoll(value.c_str());
    else if (key == "threads")
      v.threads = number;
    else if (key == "blocks")
      v.blocks = number;
    else if (key == "columns")
      v.columns = number;
    else if (key == "stretches")
      v.stretches = number;
    else if (key == "tiles")
      v.tiles = number;
    else if (key == "producers")
      v.producers = number;
    else if (key == "overlap")
      v.overlap = number;
    else if (key == "first")
      v.first = number;
    else if (key == "second")
      v.second = number;
    else
      std::printf("unknown option %s\n", key.c_str()), std::exit(2);
    at = end + 1;
  }
  return v;
}

}  // namespace
}  // namespace shardsum

int main(int argc, char** argv) {
  using namespace shardsum;
  const auto all = make();
  std::printf("%d GPU(s)\n", all[1].device + 1);
  bool good = true;
  for (int i = 1; i < argc; ++i) {
    const Variant v = parse(argv[i]);
    const unsigned wrong = sums(v) ? verify(all, v) : 0;
    good &= wrong == 0;
#ifdef TRACE
    clear_trace(all);
#endif
    const double us = microseconds(all, v);
    std::printf("%-70s %8.2f us %6.1f GB/s", argv[i], us, v.bytes / us / 1e3);
    if (wrong) std::printf("  %u WRONG", wrong);
#ifdef TRACE
    print_trace(all);
#endif
    std::printf("\n");
    std::fflush(stdout);
  }
  return good ? 0 : 1;
}
