// What warps do in a two-shot: write peers' parts of this process's rows, sum this process's part, copy peers' sums.
//
// A tile has a part for each process, which sums it. In a two-shot a slot of staging holds of its row what lies in its
// own process's parts, part after part; the area of results holds a whole chunk.
#pragma once
#include "sum.cuh"

namespace shardsum {

constexpr int kUnitBytes = 8 * 32 * 16;  // that a warp copies at a time: 8 vectors a lane

__device__ __forceinline__ int64_t part_elements(const PeerCall& c) {
  return int64_t(c.part_stretches) * c.stretch_elements;
}
__device__ __forceinline__ int peer_after(const PeerCall& c, int k) {  // round robin; itself for k = num_processes
  return c.process + k < c.num_processes ? c.process + k : c.process + k - c.num_processes;
}

// Where element 0 of virtual rank `rank` would be in the staging of `process`, if it lay in tile 0; and how far from
// there, in bytes, the elements of another tile are.
__device__ __forceinline__ char* slot_origin(const PeerCall& c, int parity, int process, int rank) {
  return c.base[process] + c.staging_at + parity * c.staging_bytes + rank * c.row_bytes -
         (c.chunk_begin + process * part_elements(c)) * c.in_bytes;
}
__device__ __forceinline__ int64_t tile_shift(const PeerCall& c, int64_t tile) {
  return tile * (part_elements(c) - c.tile_elements) * c.in_bytes;
}
// Where element 0 would be in the results of `process`.
__device__ __forceinline__ char* results_origin(const PeerCall& c, int parity, int process) {
  return c.base[process] + c.reduced_at + parity * c.reduced_bytes - c.chunk_begin * c.out_bytes;
}

// ---- first round --------------------------------------------------------------------------------------------------
// Copies the block's tiles of one piece of this process's rows: each process's part to that process; of rows that are
// read where the caller put them, none to this one. Units are dealt to the warps in turn.
__device__ __forceinline__ void write_parts(const PeerCall& c, int parity, int piece, Worker worker) {
  const int64_t part = part_elements(c);
  const int unit = kUnitBytes / c.in_bytes, units = int((part + unit - 1) / unit);
  int u = worker.index;
#pragma unroll 1
  for (int k = 1; k <= c.num_processes; ++k) {
    const int g = peer_after(c, k);
#pragma unroll 1
    for (int i = 0; i < c.num_sources; ++i) {
      const HeldRow& h = c.held[i];
      if (k == c.num_processes && h.direct) continue;
      const Range row = chunk_range(c, h.start, h.length);
      char* slot = slot_origin(c, parity, g, c.sources[i].rank);
#pragma unroll 1
      for (int j = 0; j < c.tiles_per_piece; ++j) {
        const int64_t tile = tile_of(c, piece, j), begin = c.chunk_begin + tile * c.tile_elements + g * part;
#pragma unroll 1
        for (; u < units; u += worker.count) {
          const int64_t lo = begin + int64_t(u) * unit;
          const Range range = clip({lo, min(lo + unit, begin + part)}, row.begin, row.end);
          if (range.begin >= range.end) continue;
          copy_bytes<false>(slot + tile_shift(c, tile), h.origin, range.begin * c.in_bytes, range.end * c.in_bytes,
                            {0, 1});
        }
        u -= units;
      }
    }
  }
}

// By one warp: the rows as this process reads them, in its own memory.
__device__ __forceinline__ void await_parts(const PeerCall& c, Shared& s) {
  const int parity = parity_of(s.epoch);
#pragma unroll 1
  for (int r = lane_index(); r < c.num_ranks; r += 32) {
    const int owner = c.owner[r], place = c.place[r];
    const bool near = owner == c.process && c.held[place].direct;
    RowFlag came;
    if (!await_row(c, s, owner, row_flag(c, c.process, parity, blockIdx.x, r), came)) continue;
    s.rows[r] = {near ? c.held[place].origin : slot_origin(c, parity, c.process, r),
                 chunk_range(c, uint32_t(came.start), uint32_t(came.length)), near};
  }
}

// ---- sums ---------------------------------------------------------------------------------------------------------
// Looks up which rows cover a stretch. True: none, and its sum is zero, which every process knows by itself.
__device__ __forceinline__ bool is_zero(const PeerCall& c, const Shared& s, WarpSpace& space, const Stretch& x) {
  Segment& segment = space.segment;
  if (x.lo < segment.lo || x.hi > segment.hi) find_segment(s, c.num_ranks, x.lo, x.hi, segment);
  return segment.count == 0 && !c.has_scale;
}

// Bytes [lo, hi) of the result.
__device__ __forceinline__ void fill_zeros(char* out, int64_t lo, int64_t hi) {
  if (((reinterpret_cast<uint64_t>(out) | lo | hi) & 15) == 0) return store_zeros(out + lo, int(hi - lo));
#pragma unroll 1
  for (int64_t i = lo + lane_index(); i < hi; i += 32) out[i] = 0;
}

// A vector of results, to this process's output and to all peers' results. `to`: bytes from element 0 of either.
template <typename Out, typename A, int V>
__device__ __forceinline__ void store_everywhere(const PeerCall& c, int parity, int64_t to, const A (&acc)[V]) {
  using Piece = std::conditional_t<(V * sizeof(Out) < 16), uint2, uint4>;
  constexpr int kPieces = V * int(sizeof(Out)) / int(sizeof(Piece));
  alignas(16) Out values[V];
#pragma unroll
  for (int j = 0; j < V; ++j) values[j] = round_to<Out>(acc[j]);
  const Piece* pieces = reinterpret_cast<const Piece*>(values);
#pragma unroll 1
  for (int k = 1; k < c.num_processes; ++k) {
    Piece* peers = reinterpret_cast<Piece*>(results_origin(c, parity, peer_after(c, k)) + to);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) peers[i] = pieces[i];
  }
  Piece* own = reinterpret_cast<Piece*>(static_cast<char*>(c.outputs[0].data) + to);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) __stcs(own + i, pieces[i]);
}

// A whole stretch that all `n` rows of the list cover: what is summed goes to all at once. `at`: bytes from the origin
// of a result to the stretch.
template <typename T, typename Out>
__device__ __forceinline__ void sum_whole(const PeerCall& c, const Epilogue& e, int parity, const ActiveRow* list,
                                          int n, int64_t at) {
  constexpr int V = kVec<T>, kColumns = 2, kRows = 4, kBytes = V * int(sizeof(Out));
#pragma unroll 1
  for (int column = 0; column < c.warp_columns; column += kColumns) {
    acc_t<T> acc[kColumns][V] = {};
#pragma unroll 1
    for (int k = 0; k < n; k += kRows) {
      Raw<T> raw[kRows][kColumns] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          if (k + i < n && column + j < c.warp_columns)
            raw[i][j] = load_raw<T>(list[k + i].first + ((column + j) * 32 + lane_index()) * kVecBytes<T>);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) add_vector<T>(acc[j], raw[i][j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (column + j >= c.warp_columns) break;
      int count[V];
#pragma unroll
      for (int v = 0; v < V; ++v) count[v] = n;
      if (!e.plain) combine<acc_t<T>, V>(e, 0, V, acc[j], count);
      store_everywhere<Out>(c, parity, at + ((column + j) * 32 + lane_index()) * kBytes, acc[j]);
    }
  }
}

// Any stretch: summed into this process's own results, and copied from there to all.
template <typename T, typename Out, DType kOut>
__device__ __forceinline__ void sum_stretch_of_part(const PeerCall& c, const Shared& s, WarpSpace& space,
                                                    const Stretch& x) {
  constexpr int kRows = std::is_floating_point_v<acc_t<T>> ? kPeerBatch : kPeerBatch / 2;
  const int parity = parity_of(s.epoch), lo = int(x.lo - x.first), hi = int(x.hi - x.first);
  Epilogue e{};
  e.out_dtype = kOut;
  e.plain = !c.mean && !c.has_scale;
  e.mean = c.mean, e.has_scale = c.has_scale, e.scale = c.scale;
  const int n = list_active(s, c.num_ranks, x.first, lo, hi, c.in_bytes, space.list, tile_shift(c, x.tile));
  char* out = static_cast<char*>(c.outputs[0].data);
  const bool whole = hi == c.stretch_elements && reinterpret_cast<uintptr_t>(out) % 16 == 0;
  if (whole && space.segment.count >= 0) return sum_whole<T, Out>(c, e, parity, space.list, n, x.first * c.out_bytes);
  char* own = results_origin(c, parity, c.process);
  e.out = own + x.first * c.out_bytes;
  sum_any<T, kRows>(e, space.list, n, c.warp_columns, lo, hi);
  __syncwarp();
#pragma unroll 1
  for (int k = 1; k <= c.num_processes; ++k) {
    char* to = k < c.num_processes ? results_origin(c, parity, peer_after(c, k)) : out;
    copy_bytes<true>(to, own, x.lo * c.out_bytes, x.hi * c.out_bytes, {0, 1});
  }
}

__device__ __forceinline__ void sum_part(const PeerCall& c, const Shared& s, WarpSpace& space, const Stretch& x) {
  switch (c.kind) {
#define SHARDSUM_SUM(index, T, Out, in, out_dtype)                 \
  case index:                                                      \
    sum_stretch_of_part<T, Out, DType::out_dtype>(c, s, space, x); \
    break;
    SHARDSUM_PEER_KINDS(SHARDSUM_SUM)
#undef SHARDSUM_SUM
    default:
      break;
  }
  __syncwarp();
}

// ---- second round -------------------------------------------------------------------------------------------------
__device__ __forceinline__ int copies_per_piece(const PeerCall& c) {
  return (c.num_processes - 1) * c.tiles_per_piece * c.part_stretches;
}

// Copies one stretch of what peers have written to the output: the `ticket`-th of the block, in the order of pieces.
__device__ __forceinline__ void copy_results(const PeerCall& c, const Shared& s, WarpSpace& space, int ticket) {
  const int stretches = c.tiles_per_piece * c.part_stretches, piece = ticket / copies_per_piece(c);
  const int rest = ticket - piece * copies_per_piece(c), k = rest / stretches;
  const Stretch x = stretch_of(c, piece, rest - k * stretches, peer_after(c, k + 1), 0, c.chunk_end);
  if (x.lo >= x.hi || is_zero(c, s, space, x)) return;
  copy_bytes<true>(static_cast<char*>(c.outputs[0].data), results_origin(c, parity_of(s.epoch), c.process),
                   x.lo * c.out_bytes, x.hi * c.out_bytes, {0, 1});
}

// All stretches of the block that no row reaches, of any process: they need no wait.
__device__ __forceinline__ void fill_unreached(const PeerCall& c, const Shared& s, WarpSpace& space, Worker worker) {
  char* out = static_cast<char*>(c.outputs[0].data);
  const int stretches = c.tiles_per_piece * c.part_stretches;
  int w = worker.index;
#pragma unroll 1
  for (int piece = 0; piece < c.num_pieces; ++piece) {
#pragma unroll 1
    for (int g = 0; g < c.num_processes; ++g) {
#pragma unroll 1
      for (; w < stretches; w += worker.count) {
        const Stretch x = stretch_of(c, piece, w, g, 0, c.chunk_end);
        if (x.lo < x.hi && is_zero(c, s, space, x)) fill_zeros(out, x.lo * c.out_bytes, x.hi * c.out_bytes);
      }
      w -= stretches;
    }
  }
}

}  // namespace shardsum
