// One collective over peer memory, as the host describes it to the kernels (no torch, no CUDA headers).
//
// Every process owns one symmetric block that all its peers have mapped:
//
//     flags    [2 parities][max_blocks][flag_ranks]     RowFlag      where and how long each virtual rank's row is
//     stages   [2 parities][max_blocks][num_processes]  StageFlag    how far each process has come
//     abort                                             uint64       nonzero once a peer has given up
//     began    [num_processes]                          uint64       the last launch that each process has begun
//     staging  [2 parities][staging_bytes]              slots of row_bytes: for each hosted virtual rank, or for all
//     reduced  [2 parities][reduced_bytes]              two-shot: the sum of a chunk, written by all
//     inboxes  [2 parities][inbox_bytes]                slots for rows that are pushed by their owners; all bits set
//
// all zero at set-up but the inboxes, and a private PeerControl. A call moves the flat elements [chunk_begin,
// chunk_end) of a range of size * width; see docs/engineering/peer.md for the protocol.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../row_table.h"

namespace shardsum {

constexpr int kPeerMaxRanks = 64;   // virtual ranks of a group, hence processes
constexpr int kPeerMaxHosted = 32;  // sources, and outputs, of one process
constexpr int kPeerHeaders = 2;     // that a launch can spoil

// Words {epoch, value}: each is valid by itself, once its epoch is the awaited one.
struct RowFlag {
  uint64_t length, start;      // positions
  uint64_t number, signature;  // of the call, as its owner knows them: PeerCall
};
struct StageFlag {
  uint64_t staged;   // pieces copied or written to staging
  uint64_t reduced;  // two-shot: pieces summed, and written to all
};

struct alignas(8) PeerControl {  // device memory of one process, zeroed at set-up
  uint32_t epoch;                // of the last launch
  uint32_t failed;
  uint32_t ticket;
  uint32_t unused;
};

// In pinned host memory, zeroed at set-up; kind is written last.
enum FailureKind {
  kPeerAbsent = 1,
  kPeerDiffers = 2
};  // `reporter` timed out waiting for `process`; it is in another call
struct PeerFailure {
  int64_t kind;  // 0: none
  int64_t process, block, epoch, reporter;
  int64_t number, signature, their_number, their_signature;  // where this process found the difference itself
};

struct PeerSource {
  const void* data;        // the row's first position
  uint32_t rank;           // virtual rank
  uint32_t start, length;  // unless device_lengths is given
  uint32_t capacity;       // positions at `data`
};

// A source in one chunk. An "origin" is the address at which flat element 0 would be.
struct HeldRow {
  const char* origin;                // of the caller's tensor
  int64_t staged_origin;             // offset from the staging area of a parity
  int64_t copied_begin, copied_end;  // elements that go to staging: what others need, or all where `direct` is false
  uint32_t start, length;            // positions
  bool direct;                       // this process reads the row where it lies
};

struct Gap {
  uint32_t begin, end;  // positions
};

struct PeerOutput {
  void* data;
  uint32_t begin, end;  // positions
};

struct alignas(16) PeerCall {
  PeerControl* control;
  const uint64_t* own_abort;  // set by peer_launch: this process's abort word

  // Sent with every row's bounds and compared by who awaits them: processes that make different calls fail.
  uint32_t number;     // of the call, among those of its group
  uint32_t signature;  // a hash of all that its processes pass alike

  int32_t num_ranks, num_processes, process;
  int32_t flag_ranks;  // rows of flags a block has: num_ranks of the group's largest call
  int32_t num_sources, num_outputs;
  DType in_dtype, out_dtype;
  int32_t in_bytes, out_bytes;  // of an element
  bool move;                    // copy bytes (both dtypes kUInt8; rows do not overlap) instead of summing
  bool two_shot;                // needs one output [0, size) on every process, no move, and write
  bool push;                    // sums of elements of 2 bytes and more: rows are pushed to the inboxes
  bool write;                   // rows are written to their readers' staging, where every rank has a slot; in a
                                // two-shot it holds of the row only what lies in that process's parts
  bool mean, has_scale;
  double scale;

  int64_t size, width;             // positions, elements per position
  int64_t chunk_begin, chunk_end;  // elements; chunk_begin is a multiple of 16 elements

  // The tile map, equal on all processes: tile t is the elements [t, t + 1) * tile_elements of the chunk and belongs
  // to block t % num_blocks, whose j-th tile is in piece j / tiles_per_piece. A stretch is what one warp takes at a
  // time. In a two-shot a tile has one part for each process: stretches_per_tile is a multiple of num_processes.
  int32_t tile_elements, stretch_elements, stretches_per_tile;
  int32_t warp_columns;  // vectors a lane in a stretch
  int32_t tiles_per_piece;
  int32_t num_blocks, max_blocks;
  int32_t num_threads, producer_warps;  // at most 256; producers copy, write or push while the others sum. 0, of rows
                                        // that are pushed: all push, then all sum

  char* base[kPeerMaxRanks];                            // the symmetric block of every process, as mapped here
  int64_t stages_at, abort_at, staging_at, reduced_at;  // staging: the inboxes, where rows are pushed
  int64_t staging_bytes, row_bytes, reduced_bytes;
  uint8_t owner[kPeerMaxRanks];                                 // of each virtual rank
  uint8_t place[kPeerMaxRanks];                                 // its place among those its owner hosts
  uint8_t slot[kPeerMaxRanks];                                  // of staging
  uint32_t need_begin[kPeerMaxRanks], need_end[kPeerMaxRanks];  // positions of each that others than its owner read
  // Between two processes: what the peer, and what this one, does not read between positions that it does. Stretches
  // inside are neither sent nor awaited. Else empty.
  Gap peer_gap, own_gap;

  PeerFailure* failure;
  int64_t timeout_ns;

  const void* device_lengths;  // (num_sources,), or null; values are clamped, and rows start at 0
  bool index64;
  bool overlaps;  // the launch may begin while the kernel before it in the stream still runs

  PeerSource sources[kPeerMaxHosted];
  PeerOutput outputs[kPeerMaxHosted];

  // Set by peer_launch: what the kernel need not work out.
  int32_t kind;  // of the sum: a pair of dtypes
  int32_t num_pieces;
  int32_t part_stretches;        // of a tile, that one process sums
  uint64_t part_reciprocal;      // 2^32 / part_stretches, rounded up
  HeldRow held[kPeerMaxHosted];  // unless device_lengths is given

  // Sums that others have begun: of all outputs, one behind the other, unrounded; null: +0.0. Only in one
  // round, of rows that are read or written, without device_lengths.
  const void* accumulators;
  int32_t carried;  // contributions to each of them

  // Two words each, or null. They become -1 where this process does not get its sums: what it sends on with such a
  // header is refused (shardsum/transports/headers.py).
  int64_t* headers[kPeerHeaders];
};

// One launch on `stream` of the current device, by the kernel that its way takes. Returns a cudaError_t as int, as all
// of these. warp_spaces: bytes of shared memory for all warps of a block (sum.cuh).
int peer_launch(PeerCall& call, void* stream);
int peer_one_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream);  // one_shot.cu
int peer_fold_launch(const PeerCall& call, size_t warp_spaces, void* stream);      // the same
int peer_two_shot_launch(const PeerCall& call, size_t warp_spaces, void* stream);  // two_shot.cu
int peer_push_launch(const PeerCall& call, void* stream);    // push.cu: the chunk fits the inboxes
int peer_stream_launch(const PeerCall& call, void* stream);  // stream.cu: likewise

// Host memory of one group: what orders its calls.
struct PeerHost {
  int64_t eager_event, capture_event;  // cudaEvent_t
  int64_t eager_stream;                // of the last call outside a capture; -1 before the first
  int64_t eager_records;               // 1 once such calls have come on two streams
  int64_t capture_id, capture_stream;  // of the last captured call
};

constexpr int kPeerNotWarm = -1;

// The launches of one call, chunk by chunk, after the group's previous call on whatever stream that was. A call that is
// captured must have run before (`warm`), else kPeerNotWarm: first use loads code, which a capture cannot.
int peer_enqueue(PeerCall& call, int64_t chunk_elements, bool warm, PeerHost& host, void* stream);

}  // namespace shardsum
