// Four ways to tell a kernel which of R = 4 rows contribute at each of S = 20 positions, and an empty kernel for the
// floor. Only gpu_seed.py uses them, to show by measurement why the library passes bounds as kernel arguments.
#include <cstdint>

namespace {

constexpr int kRows = 4, kSize = 20;

__global__ void empty() {}

__global__ void mask_tensor(const float* x, const bool* mask, float* out) {
  const int j = threadIdx.x;
  if (j >= kSize) return;
  float acc = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc += mask[r * kSize + j] ? x[r * kSize + j] : 0.f;
  out[j] = acc;
}

__constant__ uint8_t constant_mask[kRows * kSize];

__global__ void mask_constant(const float* x, float* out) {
  const int j = threadIdx.x;
  if (j >= kSize) return;
  float acc = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc += constant_mask[r * kSize + j] ? x[r * kSize + j] : 0.f;
  out[j] = acc;
}

__device__ constexpr uint32_t kBits[kRows] = {(1u << 8) - 1, (1u << 12) - 1, (1u << 10) - 1, (1u << 18) - 1};

__global__ void mask_compiled(const float* x, float* out) {
  const int j = threadIdx.x;
  if (j >= kSize) return;
  float acc = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc += kBits[r] >> j & 1 ? x[r * kSize + j] : 0.f;
  out[j] = acc;
}

struct Lengths {
  int of[kRows];
};

__global__ void lengths_arguments(const float* x, Lengths lengths, float* out) {
  const int j = threadIdx.x;
  if (j >= kSize) return;
  float acc = 0.f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) acc += j < lengths.of[r] ? x[r * kSize + j] : 0.f;
  out[j] = acc;
}

}  // namespace

extern "C" {

int set_constant_mask(const uint8_t* host) { return cudaMemcpyToSymbol(constant_mask, host, kRows * kSize); }

// variant: 0 empty, 1 mask tensor, 2 constant memory, 3 compiled bits, 4 lengths as arguments.
int launch_variant(int variant, const float* x, const bool* mask, const int* lengths, float* out, cudaStream_t stream) {
  Lengths l;
  for (int r = 0; r < kRows; ++r) l.of[r] = lengths[r];
  switch (variant) {
    case 0:
      empty<<<1, 32, 0, stream>>>();
      break;
    case 1:
      mask_tensor<<<1, 32, 0, stream>>>(x, mask, out);
      break;
    case 2:
      mask_constant<<<1, 32, 0, stream>>>(x, out);
      break;
    case 3:
      mask_compiled<<<1, 32, 0, stream>>>(x, out);
      break;
    default:
      lengths_arguments<<<1, 32, 0, stream>>>(x, l, out);
  }
  return cudaGetLastError();
}
}
