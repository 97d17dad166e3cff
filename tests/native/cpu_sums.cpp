// Random sums by csrc/cpu under AddressSanitizer and UndefinedBehaviorSanitizer, compared bit for bit with plain loops.
//
// Every row, mask and output lies in a heap block of exactly its size, at any alignment that its dtype allows, so that
// a read or write past it is an error. Stands without torch: what the kernels ask of it is at the end of this file.
//   cpu_sums <seed> <cases>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "row_table.h"

extern "C" const char* shardsum_limit_cpu_isa(const char* name);

using namespace shardsum;

namespace {

std::mt19937_64 rng;
uint32_t num_threads = 1;

int64_t pick(int64_t low, int64_t high) { return low + static_cast<int64_t>(rng() % uint64_t(high - low + 1)); }

// A heap block of exactly `bytes`, whose address is a multiple of `alignment` and of no more than chance gives.
struct Block {
  Block(int64_t bytes, int64_t alignment) : offset(pick(0, 3) * alignment), memory(new uint8_t[bytes + offset]) {
    for (int64_t i = 0; i < bytes; ++i) data()[i] = uint8_t(rng());
  }
  uint8_t* data() const { return memory.get() + offset; }
  int64_t offset;
  std::unique_ptr<uint8_t[]> memory;
};

template <class T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

// Halves by integer arithmetic of their own, value by value.
float from_half(uint16_t h) {
  const int exponent = h >> 10 & 31, fraction = h & 0x3ff;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? std::nanf("") : sign * INFINITY;
  return sign * (exponent ? std::ldexp(float(1024 + fraction), exponent - 25) : std::ldexp(float(fraction), -24));
}

// The nearest of all values of a 16-bit float with `bits` of fraction, ties to the even one.
uint16_t nearest16(float value, int fraction_bits, int least_exponent, int infinity) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return uint16_t(infinity | 1 << (fraction_bits - 1));
  const float magnitude = std::fabs(value);
  if (std::isinf(value)) return uint16_t(sign | infinity);
  int exponent = magnitude > 0 ? std::ilogb(magnitude) : least_exponent;
  if (exponent < least_exponent) exponent = least_exponent;
  const double steps = std::nearbyint(std::ldexp(double(magnitude), fraction_bits - exponent));
  // steps >= 2^fraction_bits for normal numbers; the hidden bit carries into the exponent by itself.
  const int64_t biased = int64_t(exponent - least_exponent) << fraction_bits;
  const int64_t bits = biased + int64_t(steps);
  return uint16_t(sign | (bits < infinity ? bits : infinity));
}
uint16_t to_half(float value) { return nearest16(value, 10, -14, 0x7c00); }
uint16_t to_bfloat16(float value) { return nearest16(value, 7, -126, 0x7f80); }

template <class Acc>
Acc value_at(const uint8_t* data, int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return Acc(from_half(read<uint16_t>(data + 2 * i)));
    case DType::kBFloat16: {
      const uint32_t wide = uint32_t(read<uint16_t>(data + 2 * i)) << 16;
      return Acc(read<float>(reinterpret_cast<const uint8_t*>(&wide)));
    }
    case DType::kFloat32:
      return Acc(read<float>(data + 4 * i));
    case DType::kFloat64:
      return Acc(read<double>(data + 8 * i));
    case DType::kUInt8:
      return Acc(data[i]);
    case DType::kBool:
      return Acc(data[i] != 0);
    case DType::kInt8:
      return Acc(read<int8_t>(data + i));
    case DType::kInt16:
      return Acc(read<int16_t>(data + 2 * i));
    case DType::kInt32:
      return Acc(read<int32_t>(data + 4 * i));
    case DType::kInt64:
      break;
  }
  return Acc(read<int64_t>(data + 8 * i));
}

// Element i after the sum: divided, scaled, added to what was there; the bits of the output's dtype.
template <class Acc>
uint64_t finished(Acc acc, int64_t count, const uint8_t* previous, int64_t i, const SumArgs& args) {
  if constexpr (std::is_floating_point_v<Acc>) {
    if (args.finish.mean && count) acc = acc / Acc(count);
    if (args.finish.has_scale) acc = acc * Acc(args.finish.scale);
  }
  if (args.finish.accumulate) acc = value_at<Acc>(previous, i, args.out_dtype) + acc;
  uint64_t bits = 0;
  if constexpr (std::is_floating_point_v<Acc>) {
    const float single = float(acc);
    if (args.out_dtype == DType::kFloat16) return to_half(single);
    if (args.out_dtype == DType::kBFloat16) return to_bfloat16(single);
    if (args.out_dtype == DType::kFloat32) return std::memcpy(&bits, &single, 4), bits;
  }
  return std::memcpy(&bits, &acc, sizeof(acc)), bits;
}

bool is_nan(uint64_t bits, DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return (bits & 0x7fff) > 0x7c00;
    case DType::kBFloat16:
      return (bits & 0x7fff) > 0x7f80;
    case DType::kFloat32:
      return (bits & 0x7fffffff) > 0x7f800000;
    case DType::kFloat64:
      return (bits & 0x7fffffffffffffff) > 0x7ff0000000000000;
    default:
      return false;
  }
}

// held(r, i): where row r has element i, or null.
template <class Acc, class Held>
int64_t wrong_elements(const SumArgs& args, const Block& before, const Block& carry, const Held& held) {
  int64_t wrong = 0;
  const int64_t bytes = element_size(args.out_dtype);
  for (int64_t i = 0; i < args.size * args.width; ++i) {
    Acc acc = args.carry ? read<Acc>(carry.data() + sizeof(Acc) * i) : Acc(0);
    int64_t count = args.finish.carried;
    for (int64_t r = 0; r < args.num_rows; ++r) {
      if (const uint8_t* p = held(r, i)) acc += value_at<Acc>(p, 0, args.in_dtype), ++count;
    }
    const uint64_t expected = finished(acc, count, before.data(), i, args);
    uint64_t actual = 0;
    std::memcpy(&actual, static_cast<const uint8_t*>(args.out) + bytes * i, bytes);
    wrong += actual != expected && !(is_nan(actual, args.out_dtype) && is_nan(expected, args.out_dtype));
  }
  return wrong;
}

template <class Held>
int64_t count_wrong(const SumArgs& args, const Block& before, const Block& carry, const Held& held) {
  if (args.in_dtype == DType::kFloat64) return wrong_elements<double>(args, before, carry, held);
  if (args.in_dtype < DType::kFloat64) return wrong_elements<float>(args, before, carry, held);
  return wrong_elements<uint64_t>(args, before, carry, held);  // wraps
}

DType random_out_dtype(DType in) {
  if (in == DType::kFloat64) return pick(0, 1) ? in : DType::kFloat32;
  return in < DType::kFloat64 ? DType(pick(0, 2)) : DType::kInt64;
}

int64_t run_case() {
  const char* isas[] = {"baseline", "avx2", "avx512"};
  shardsum_limit_cpu_isa(isas[pick(0, 2)]);
  num_threads = pick(1, 3);
  const bool large = pick(0, 19) == 0, masked = pick(0, 2) == 0;
  SumArgs args{};
  args.in_dtype = DType(pick(0, 9));
  args.out_dtype = random_out_dtype(args.in_dtype);
  args.num_rows = pick(0, 19) ? pick(1, 12) : pick(65, 140);
  args.size = pick(0, large ? 3000 : 200);
  args.width = large ? pick(1, 64) : pick(0, 2) ? pick(1, 5) : 1;
  args.finish.mean = args.in_dtype <= DType::kFloat64 && pick(0, 1);
  args.finish.has_scale = args.in_dtype <= DType::kFloat64 && pick(0, 1);
  args.finish.scale = 0.1;
  args.finish.accumulate = pick(0, 3) == 0;
  const int64_t in_bytes = element_size(args.in_dtype), out_bytes = element_size(args.out_dtype);
  const int64_t elements = args.size * args.width, acc_bytes = args.in_dtype < DType::kFloat64 ? 4 : 8;
  Block out(elements * out_bytes, out_bytes), before(elements * out_bytes, out_bytes);
  Block carry(elements * acc_bytes, acc_bytes);
  std::memcpy(before.data(), out.data(), elements * out_bytes);
  args.out = out.data();

  if (masked && args.size > 0) {
    const int64_t stride = args.size * args.width + pick(0, 3);
    const Block x(((args.num_rows - 1) * stride + args.size * args.width) * in_bytes, in_bytes);
    const bool packed = pick(0, 1);
    const int64_t mask_row = packed ? (args.size + 31) / 32 : args.size;
    const Block mask(args.num_rows * mask_row * (packed ? 4 : 1), packed ? 4 : 1);
    if (!packed) {
      for (int64_t i = 0; i < args.num_rows * mask_row; ++i) mask.data()[i] &= 1;
    }
    sum_masked_cpu(args, x.data(), stride, Mask{mask.data(), mask_row, packed});
    return count_wrong(args, before, carry, [&](int64_t r, int64_t i) -> const uint8_t* {
      const int64_t p = i / args.width;
      const bool set = packed ? read<uint32_t>(mask.data() + 4 * (r * mask_row + p / 32)) >> (p % 32) & 1
                              : mask.data()[r * mask_row + p];
      return set ? x.data() + (r * stride + i) * in_bytes : nullptr;
    });
  }

  if (pick(0, 3) == 0) {
    args.carry = carry.data();
    args.finish.carried = int32_t(pick(0, 3));
  }
  std::vector<Block> blocks;
  std::vector<Row> rows;
  for (int64_t r = 0; r < args.num_rows; ++r) {
    const int64_t begin = pick(0, elements), end = pick(begin, elements);
    blocks.emplace_back((end - begin) * in_bytes, in_bytes);
    rows.push_back({blocks.back().data(), begin, end});
  }
  sum_rows_cpu(args, rows.data());
  return count_wrong(args, before, carry, [&](int64_t r, int64_t i) -> const uint8_t* {
    if (i < rows[r].begin || i >= rows[r].end) return nullptr;
    return blocks[r].data() + (i - rows[r].begin) * in_bytes;
  });
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const int64_t cases = argc > 2 ? std::atoll(argv[2]) : 1000;
  for (int64_t i = 0; i < cases; ++i) {
    rng.seed(seed + i);
    if (const int64_t wrong = run_case()) {
      std::printf("seed %llu: %lld elements differ\n", (unsigned long long)(seed + i), (long long)wrong);
      return 1;
    }
  }
  std::printf("%lld sums are right\n", (long long)cases);
}

// What csrc/cpu/tasks.h takes from torch.
extern "C" int32_t torch_get_num_threads(uint32_t* out) {
  *out = num_threads;
  return 0;
}
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*),
                                      void* context) {
  std::vector<std::thread> threads;
  for (int64_t task = begin; task < end; ++task) threads.emplace_back(body, task, task + 1, context);
  for (std::thread& thread : threads) thread.join();
  return 0;
}
