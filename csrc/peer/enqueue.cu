// The host side of a call over peer memory: which kernel takes it, chunk by chunk, after the group's previous call on
// whatever stream that was.
#include <cuda_runtime.h>

#include <atomic>

#include "sum.cuh"

namespace shardsum {

int peer_launch(PeerCall& call, void* stream) {
  call.own_abort = reinterpret_cast<const uint64_t*>(call.base[call.process] + call.abort_at);
  call.kind = kind_of(call);
  if (call.kind < 0) return cudaErrorInvalidValue;
  const int64_t per_piece = int64_t(call.num_blocks) * call.tiles_per_piece;
  call.num_pieces = int32_t((num_tiles(call) + per_piece - 1) / per_piece);
  call.part_stretches = call.stretches_per_tile / (call.two_shot ? call.num_processes : 1);
  call.part_reciprocal = ((uint64_t(1) << 32) + call.part_stretches - 1) / call.part_stretches;
  if (call.device_lengths == nullptr)
    for (int i = 0; i < call.num_sources; ++i)
      call.held[i] = describe_held(call, i, call.sources[i].start, call.sources[i].length);
  const size_t spaces = call.num_threads / 32 * warp_space_bytes(call.num_ranks);
  if (call.accumulators != nullptr) {
    if (call.push || call.two_shot || call.move) return cudaErrorInvalidValue;
    return peer_fold_launch(call, spaces, stream);
  }
  if (call.push) return call.producer_warps > 0 ? peer_stream_launch(call, stream) : peer_push_launch(call, stream);
  if (call.two_shot) return peer_two_shot_launch(call, spaces, stream);
  return peer_one_shot_launch(call, spaces, stream);
}

// Whether the current GPU can begin a kernel while the one before it in its stream ends.
static bool can_overlap() {
  static std::atomic<int> known[64];  // by device: 0 unknown, 1 no, 2 yes
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  if (known[device] == 0) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    known[device] = major >= 9 ? 2 : 1;
  }
  return known[device] == 2;
}

// Whether all that the next kernel in a captured stream depends on is one kernel.
static bool follows_one_kernel(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  const cudaGraphEdgeData* edges = nullptr;
  if (cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, &edges, &count) != cudaSuccess) return false;
#else
  if (cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, nullptr, &nodes, &count) != cudaSuccess) return false;
#endif
  cudaGraphNodeType type;
  return count == 1 && cudaGraphNodeGetType(nodes[0], &type) == cudaSuccess && type == cudaGraphNodeTypeKernel;
}

// The group's last call outside a capture is over, for what `stream` gets from now on.
static cudaError_t follow_eager_call(PeerHost& host, cudaStream_t stream) {
  if (host.eager_stream == -1 || host.eager_stream == reinterpret_cast<int64_t>(stream)) return cudaSuccess;
  const auto event = reinterpret_cast<cudaEvent_t>(host.eager_event);
  if (host.eager_stream == 0 && !host.eager_records) {
    if (const cudaError_t e = cudaEventRecord(event, nullptr)) return e;
  }
  host.eager_records = 1;
  return cudaStreamWaitEvent(stream, event, 0);
}

// An event takes a tenth of the host's time. As long as all calls come on the default stream it is only recorded when
// one comes on another stream, which then waits for all that the default stream has been given. Other streams may be
// gone by then, or be captured.
static cudaError_t note_eager_call(PeerHost& host, cudaStream_t stream) {
  host.eager_stream = reinterpret_cast<int64_t>(stream);
  if (stream == nullptr && !host.eager_records) return cudaSuccess;
  return cudaEventRecord(reinterpret_cast<cudaEvent_t>(host.eager_event), stream);
}

int peer_enqueue(PeerCall& call, int64_t chunk_elements, bool warm, PeerHost& host, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const auto id_of = reinterpret_cast<int64_t>(stream_handle);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  if (stream != nullptr) {  // the default stream cannot be captured
    if (const cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &capture)) return e;
  }
  const bool capturing = status == cudaStreamCaptureStatusActive;
  const auto capture_event = reinterpret_cast<cudaEvent_t>(host.capture_event);
  if (capturing && !warm) return kPeerNotWarm;
  if (!capturing) {
    if (const cudaError_t e = follow_eager_call(host, stream)) return e;
  } else if (host.capture_id == int64_t(capture) && host.capture_stream != id_of) {
    if (const cudaError_t e = cudaStreamWaitEvent(stream, capture_event, 0)) return e;
  }
  const int64_t end = call.size * call.width;
  for (int64_t begin = 0; begin < end; begin += chunk_elements) {
    call.chunk_begin = begin;
    call.chunk_end = begin + chunk_elements < end ? begin + chunk_elements : end;
    call.overlaps = can_overlap() && (!capturing || follows_one_kernel(stream));
    if (const int e = peer_launch(call, stream_handle)) return e;
  }
  if (!capturing) return note_eager_call(host, stream);
  host.capture_id = int64_t(capture), host.capture_stream = id_of;
  return cudaEventRecord(capture_event, stream);
}

}  // namespace shardsum
