// Headers of messages (shardsum/transports/headers.py): 16 bytes that must be those of the receiver's own exchange.
#pragma once
#include <cstdint>

namespace shardsum {

constexpr int kHeaderBytes = 16;
constexpr int kMaxHeaders = 128;  // of a launch
constexpr int kMaxSpoiled = 64;

struct Spoiled {
  uint8_t* data;
  int64_t bytes;
};

// One launch. Where a received header differs from `header`, or that is not valid any more: `header` and `state` become
// -1, every byte of the outputs 255, and the record, if it is empty, {1, process, their header, this one}.
struct HeaderCheck {
  int64_t* header;  // 2 words
  int64_t* state;   // 2 words
  int64_t* record;  // 4 words in pinned host memory; the first is written last
  const uint8_t* received;
  int32_t num_headers, num_spoiled;
  int64_t offsets[kMaxHeaders];  // of the headers in `received`, at any address
  int32_t processes[kMaxHeaders];
  Spoiled spoiled[kMaxSpoiled];
};

// On `stream` of the current device. Returns a cudaError_t as int.
int check_headers_cuda(const HeaderCheck& check, void* stream);

}  // namespace shardsum
