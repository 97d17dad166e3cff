// Where the time of one call over peer memory goes: two processes' launches from one program, on two GPUs or on one.
//
//   nvcc -std=c++17 -O3 -arch=sm_90 -fmad=false benchmarks/cuda/peer_time.cu -o peer_time && ./peer_time
//   ... -DTRACE: also the cycles from the start of a block to the points of the kernel (block 0, mean over launches)
//
// bf16, R = G = 2, CUDA graphs of 40 calls. Columns: bytes, threads, blocks, vectors a lane, stretches a tile, tiles a
// piece (0: all), producer warps: microseconds.
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
#include <vector>

#include "../../csrc/cuda/peer.cu"
#include "../../csrc/cuda/peer_push.cu"

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

constexpr int kMaxBlocks = 128, kCalls = 40;
constexpr int64_t kMost = 64 << 20;

struct Process {
  int device;
  cudaStream_t stream;
  char *block, *input, *output, *buffer;
  PeerControl* control;
  PeerFailure* failure;
  char** buffers;
};

constexpr int64_t kInboxRow = (1 << 20) * 2 + 256;
int64_t stages_at() { return 2ll * kMaxBlocks * 2 * sizeof(RowFlag); }
int64_t staging_at() { return stages_at() + 2ll * kMaxBlocks * 2 * sizeof(StageFlag) + 256; }

std::vector<Process> make() {
  int devices = 0;
  CHECK(cudaGetDeviceCount(&devices));
  std::vector<Process> all;
  for (int g = 0; g < 2; ++g) {
    Process p{g % devices};
    CHECK(cudaSetDevice(p.device));
    if (devices > 1) CHECK(cudaDeviceEnablePeerAccess(1 - g, 0));
    CHECK(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking));
    const int64_t total = staging_at() + 2 * (kMost + 256) + 4 * kInboxRow;
    CHECK(cudaMalloc(&p.block, total));
    CHECK(cudaMemset(p.block, 0, total));
    for (char** q : {&p.input, &p.output, &p.buffer}) CHECK(cudaMalloc(q, kMost));
    CHECK(cudaMemset(p.input, 0x3f, kMost));
    CHECK(cudaMemset(p.buffer, 0x3f, kMost));
    CHECK(cudaMalloc(&p.control, sizeof(PeerControl)));
    CHECK(cudaMemset(p.control, 0, sizeof(PeerControl)));
    CHECK(cudaMallocHost(&p.failure, sizeof(PeerFailure)));
    std::memset(p.failure, 0, sizeof(PeerFailure));
    all.push_back(p);
  }
  const char* table[2] = {all[0].buffer, all[1].buffer};
  for (Process& p : all) {
    CHECK(cudaSetDevice(p.device));
    CHECK(cudaMalloc(&p.buffers, sizeof(table)));
    CHECK(cudaMemcpy(p.buffers, table, sizeof(table), cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());
  }
  return all;
}

enum Way { kCopyIn, kZeroCopy, kPush };
struct Shape {
  int64_t bytes;
  int threads, blocks, columns, stretches, per_piece, producers;
};

PeerCall describe_call(const std::vector<Process>& all, int g, const Shape& shape, Way way) {
  const Process& p = all[g];
  PeerCall c{};
  c.num_ranks = c.flag_ranks = c.num_processes = 2;
  c.process = g, c.num_sources = c.num_outputs = 1;
  c.in_dtype = c.out_dtype = DType::kBFloat16, c.in_bytes = c.out_bytes = 2;
  c.size = shape.bytes / 2, c.width = 1;
  c.chunk_end = c.size;
  c.stretch_elements = shape.columns * 32 * 8, c.stretches_per_tile = shape.stretches, c.warp_columns = shape.columns;
  c.tile_elements = c.stretch_elements * c.stretches_per_tile;
  const int64_t tiles = (c.size + c.tile_elements - 1) / c.tile_elements;
  c.num_blocks = int(std::min<int64_t>(shape.blocks, tiles)), c.max_blocks = kMaxBlocks;
  c.tiles_per_piece = shape.per_piece ? shape.per_piece : int((tiles + c.num_blocks - 1) / c.num_blocks);
  c.num_threads = shape.threads, c.producer_warps = shape.producers;
  for (int q = 0; q < 2; ++q) c.base[q] = all[q].block, c.owner[q] = uint8_t(q);
  c.stages_at = stages_at(), c.abort_at = staging_at() - 256, c.staging_at = staging_at();
  c.staging_bytes = c.row_bytes = kMost + 256;
  c.inbox_at = staging_at() + 2 * (kMost + 256), c.inbox_row_bytes = kInboxRow;
  c.control = p.control, c.failure = p.failure, c.buffers = p.buffers, c.timeout_ns = 2'000'000'000;
  c.stages = way != kZeroCopy, c.push = way == kPush;
  PeerSource& s = c.sources[0];
  s.data = way == kZeroCopy ? p.buffer : p.input;
  s.rank = g, s.length = s.capacity = s.need_end = uint32_t(c.size), s.buffer = way == kZeroCopy;
  c.outputs[0] = {p.output, 0, uint32_t(c.size)};
  return c;
}

double microseconds(const std::vector<Process>& all, const PeerCall* calls) {
  cudaGraphExec_t graphs[2];
  cudaEvent_t begin[2], end[2];
  const int n = calls[0].size > (4 << 20) ? 6 : kCalls;
  for (int g = 0; g < 2; ++g) {
    CHECK(cudaSetDevice(all[g].device));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(all[g].stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < n; ++i) {
      PeerCall c = calls[g];
      CHECK(peer_launch(c, all[g].stream));
    }
    CHECK(cudaStreamEndCapture(all[g].stream, &graph));
    CHECK(cudaGraphInstantiate(&graphs[g], graph, 0));
    CHECK(cudaEventCreate(&begin[g]));
    CHECK(cudaEventCreate(&end[g]));
  }
  std::vector<float> times;
  for (int i = 0; i < 15; ++i) {
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
      if (all[g].failure->kind != 0) std::printf("FAILED "), std::exit(1);
    }
    if (i > 2) times.push_back(worst * 1e3f / n);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run(const std::vector<Process>& all, const Shape& shape, std::vector<Way> ways) {
  std::printf("%9lld %4d %4d %2d %3d %2d %d:", (long long)shape.bytes, shape.threads, shape.blocks, shape.columns,
              shape.stretches, shape.per_piece, shape.producers);
  for (const Way way : ways) {
    PeerCall calls[2];
    for (int g = 0; g < 2; ++g) calls[g] = describe_call(all, g, shape, way);
#ifdef TRACE
    const std::vector<char> zeros(sizeof(trace_sum));
    CHECK(cudaSetDevice(all[0].device));
    CHECK(cudaMemcpyToSymbol(trace_sum, zeros.data(), sizeof(trace_sum)));
    CHECK(cudaMemcpyToSymbol(trace_count, zeros.data(), sizeof(trace_count)));
#endif
    const char* names[] = {"copy-in", "zero-copy", "push"};
    std::printf("  %s %.2f", names[way], microseconds(all, calls));
#ifdef TRACE
    unsigned long long sum[8][16];
    unsigned int count[8][16];
    CHECK(cudaSetDevice(all[0].device));
    CHECK(cudaMemcpyFromSymbol(sum, trace_sum, sizeof(sum)));
    CHECK(cudaMemcpyFromSymbol(count, trace_count, sizeof(count)));
    const char* points[] = {"set up", "copied", "waited", "read", "sent", "came", "start", ""};
    std::printf(" [");
    for (const int point : {0, 1, 4, 5, 2, 3}) {
      std::printf("%s", points[point]);
      for (const int w : {0, 1, 2, 8})
        if (count[point][w]) std::printf(" %llu", sum[point][w] / count[point][w]);
      std::printf("; ");
    }
    std::printf("]");
#endif
  }
  std::printf("\n");
}

}  // namespace
}  // namespace shardsum

int main() {
  const auto all = shardsum::make();
  std::printf("%d GPU(s)\n", all[1].device + 1);
  using namespace shardsum;
  const std::vector<Way> small{kCopyIn, kZeroCopy, kPush}, large{kCopyIn, kZeroCopy};
  for (const int64_t bytes : {80, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 512 << 10})
    run(all, {bytes, 256, 128, 1, 8, 0, 1}, small);
  for (const int columns : {1, 2, 4}) run(all, {1 << 20, 256, 128, columns, 8, 0, 2}, columns == 1 ? small : large);
#ifndef TRACE
  for (const int columns : {2, 4}) run(all, {2 << 20, 256, 128, columns, 8, 0, 2}, large);
  for (const int columns : {4, 8}) run(all, {4 << 20, 256, 128, columns, 8, 1, 2}, large);
  for (const int64_t bytes : {16 << 20, 64 << 20}) {
    run(all, {bytes, 256, 128, 4, 16, 1, 2}, {kZeroCopy});
    for (const int producers : {2, 3}) {
      for (const int stretches : {8, 16, 32}) run(all, {bytes, 256, 128, 4, stretches, 1, producers}, {kCopyIn});
      run(all, {bytes, 256, 128, 8, 8, 1, producers}, {kCopyIn});
      run(all, {bytes, 256, 128, 8, 16, 1, producers}, {kCopyIn});
      run(all, {bytes, 256, 96, 4, 16, 1, producers}, {kCopyIn});
    }
  }
#endif
}
