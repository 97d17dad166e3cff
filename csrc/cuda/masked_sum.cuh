// The masked sum: x is (R, size, width), mask[r, p] selects position p of row r. Any R in one launch.
//
// masked_columns_kernel (masked_columns.cuh): wide positions of whole vectors.
// masked_vectors_kernel (masked_vectors.cuh): everything else.
#pragma once
#include "arith.cuh"

namespace shardsum {

struct MaskedParams {
  Epilogue epilogue;
  const char* data;
  int64_t row_bytes;  // from one row of x to the next
  Mask mask;
  int num_rows;
  int64_t size, width;
  // masked_vectors_kernel: every vector of x is aligned; a row's mask bytes can be read four at a time
  bool aligned, mask_words;
  // masked_columns_kernel
  unsigned num_vectors, vectors_per_position;
  unsigned division, division_shift;  // v / vectors_per_position is the upper word of v * division, shifted down
  int columns;                        // of a warp
  int row_shift, row_mask;            // of its masks, (c << row_shift) + r is row r's of column c
  int num_masks;
  bool wide;           // its columns lie in one position: the first one's masks are all
  int64_t mask_bytes;  // from one row to the next; a mask is mask_which of byte p >> mask_shift, p & mask_low bits up
  unsigned mask_shift, mask_low, mask_which;
};

}  // namespace shardsum
