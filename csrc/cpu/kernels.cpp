// The inner kernels for one instruction set: SHARDSUM_ISA names it, the compiler's flags select it.
#include "kernels.h"

#include "vector.h"

namespace shardsum {
namespace SHARDSUM_ISA {
namespace {

// The steps after the sum, for elements to which `count` rows contribute.
template <class In, class Out>
struct Finisher {
  using Acc = typename AccOf<In>::type;
  static constexpr int kLanes = kVectorBytes / int(sizeof(Acc));
  using V = Vec<Acc, kLanes>;
  static constexpr bool kFloating = Acc(0.5) != Acc(0);

  explicit Finisher(const Finish& f) : finish(f), scale(static_cast<Acc>(f.scale)) {}

  // count: of each lane; where it is 0 the sum is +0.0 already and is not divided.
  V apply(V acc, V count, const Out* previous) const {
    if constexpr (kFloating) {
      if (finish.mean) acc = acc / (count == V{} ? V{} + Acc(1) : count);
      if (finish.has_scale) acc = acc * scale;
    }
    if (finish.accumulate) acc = widened(previous) + acc;
    return acc;
  }

  static V widened(const Out* p) {
    if constexpr (sizeof(Out) == 4 && sizeof(Acc) == 8) {
      return __builtin_convertvector(load_bytes<Vec<float, kLanes>>(p), V);
    } else {
      return Load<Out>::vector(p);
    }
  }

  static void store(Out* p, V acc) {
    const auto bits = rounded<kLanes>(acc, static_cast<Out*>(nullptr));
    __builtin_memcpy(p, &bits, sizeof(bits));
  }

  const Finish finish;
  const Acc scale;
};

// kVectors vectors of columns: the accumulators stay in registers while all rows go by, in their order.
template <class In, class Out, int kVectors>
inline void sum_tile(const In* const* rows, int64_t num_rows, int64_t at, Out* out, const Finisher<In, Out>& finisher) {
  using F = Finisher<In, Out>;
  typename F::V acc[kVectors] = {};
  for (int64_t r = 0; r < num_rows; ++r) {
    const In* row = rows[r] + at;
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) acc[k] += Load<In>::vector(row + k * F::kLanes);
  }
  const typename F::V count = typename F::V{} + static_cast<typename F::Acc>(num_rows);
#pragma GCC unroll 8
  for (int k = 0; k < kVectors; ++k) {
    Out* p = out + at + k * F::kLanes;
    F::store(p, finisher.apply(acc[k], count, p));
  }
}

// Fewer elements than one vector, through buffers of one.
template <class In, class Out>
void sum_rest(const In* const* rows, int64_t num_rows, int64_t at, int64_t rest, Out* out,
              const Finisher<In, Out>& finisher) {
  using F = Finisher<In, Out>;
  typename F::V acc{};
  In in_buffer[F::kLanes] = {};
  for (int64_t r = 0; r < num_rows; ++r) {
    __builtin_memcpy(in_buffer, rows[r] + at, rest * sizeof(In));
    acc += Load<In>::vector(in_buffer);
  }
  Out out_buffer[F::kLanes] = {};
  __builtin_memcpy(out_buffer, out + at, rest * sizeof(Out));
  const typename F::V count = typename F::V{} + static_cast<typename F::Acc>(num_rows);
  F::store(out_buffer, finisher.apply(acc, count, out_buffer));
  __builtin_memcpy(out + at, out_buffer, rest * sizeof(Out));
}

template <class In, class Out>
void sum_span(const void* const* row_pointers, int64_t num_rows, void* out_pointer, int64_t count,
              const Finish& finish) {
  const In* const* rows = reinterpret_cast<const In* const*>(row_pointers);
  Out* out = static_cast<Out*>(out_pointer);
  const Finisher<In, Out> finisher(finish);
  constexpr int kLanes = Finisher<In, Out>::kLanes;
  int64_t at = 0;
  for (; at + 4 * kLanes <= count; at += 4 * kLanes) sum_tile<In, Out, 4>(rows, num_rows, at, out, finisher);
  for (; at + kLanes <= count; at += kLanes) sum_tile<In, Out, 1>(rows, num_rows, at, out, finisher);
  if (at < count) sum_rest(rows, num_rows, at, count - at, out, finisher);
}

// All ones in the lanes whose bit of `word` is set.
template <class V, int kLanes>
inline auto lanes_of(uint64_t word) {
  Vec<uint64_t, kLanes> shift;
  for (int k = 0; k < kLanes; ++k) shift[k] = k;
  return ((Vec<uint64_t, kLanes>{} + word) >> shift & 1) != 0;
}

template <class In, class Out>
void sum_masked(const void* data_pointer, int64_t row_stride, int64_t num_rows, const uint64_t* words,
                void* out_pointer, int64_t count, const Finish& finish) {
  using F = Finisher<In, Out>;
  using Acc = typename F::Acc;
  using Index = decltype(typename F::V{} != typename F::V{});
  const In* data = static_cast<const In*>(data_pointer);
  Out* out = static_cast<Out*>(out_pointer);
  const F finisher(finish);
  for (int64_t at = 0; at < count; at += F::kLanes) {
    const int64_t rest = count - at < F::kLanes ? count - at : F::kLanes;
    typename F::V acc{}, contributions{};
    for (int64_t r = 0; r < num_rows; ++r) {
      const uint64_t word = words[r] >> at;
      In buffer[F::kLanes] = {};
      __builtin_memcpy(buffer, data + r * row_stride + at, rest * sizeof(In));
      Index mask;
      for (int k = 0; k < F::kLanes; ++k) mask[k] = (word >> k & 1) ? -1 : 0;
      acc = mask ? acc + Load<In>::vector(buffer) : acc;
      contributions = mask ? contributions + Acc(1) : contributions;
    }
    Out out_buffer[F::kLanes] = {};
    __builtin_memcpy(out_buffer, out + at, rest * sizeof(Out));
    F::store(out_buffer, finisher.apply(acc, contributions, out_buffer));
    __builtin_memcpy(out + at, out_buffer, rest * sizeof(Out));
  }
}

template <class In, class Out>
constexpr CpuKernels pair() {
  return {&sum_span<In, Out>, &sum_masked<In, Out>};
}

template <class In>
CpuKernels short_float(DType out) {
  if (out == DType::kFloat16) return pair<In, Half>();
  if (out == DType::kBFloat16) return pair<In, BFloat16>();
  return pair<In, float>();
}

}  // namespace

CpuKernels kernels(DType in, DType out) {
  switch (in) {
    case DType::kFloat16:
      return short_float<Half>(out);
    case DType::kBFloat16:
      return short_float<BFloat16>(out);
    case DType::kFloat32:
      return short_float<float>(out);
    case DType::kFloat64:
      return out == DType::kFloat32 ? pair<double, float>() : pair<double, double>();
    case DType::kUInt8:
    case DType::kBool:
      return pair<uint8_t, int64_t>();
    case DType::kInt8:
      return pair<int8_t, int64_t>();
    case DType::kInt16:
      return pair<int16_t, int64_t>();
    case DType::kInt32:
      return pair<int32_t, int64_t>();
    case DType::kInt64:
      return pair<int64_t, int64_t>();
  }
  return {};
}

}  // namespace SHARDSUM_ISA
}  // namespace shardsum
