// The inner kernels for one instruction set: SHARDSUM_ISA names it, the compiler's flags select it.
#include "kernels.h"

#include "vector.h"

namespace shardsum {
namespace SHARDSUM_ISA {
namespace {

constexpr int kTileVectors = 4;
constexpr int kPrefetchBytes = 512;  // ahead in each row; more is no better, none costs 16-bit dtypes a tenth

// Inputs of In, an output of Out, kLanes accumulators in a vector; and the steps after the sum.
template <class In, class Out>
struct Sum {
  using Acc = typename Element<In>::Acc;
  static constexpr int kLanes = kVectorBytes / int(sizeof(Acc));
  using V = Vec<Acc, kLanes>;
  using InBits = Vec<typename Element<In>::Bits, kLanes>;
  using OutBits = Vec<typename Element<Out>::Bits, kLanes>;
  static constexpr bool kFloating = Acc(0.5) != Acc(0);

  static V widened(InBits bits) { return Element<In>::template widened<Acc, kLanes>(bits); }
  static V loaded(const In* p) { return widened(load<InBits>(p)); }

  // count: the contributions of each lane; where it is 0 the sum is +0.0 and is not divided. previous: of out.
  OutBits finished(V acc, V count, OutBits previous) const {
    if constexpr (kFloating) {
      if (finish.mean) acc = acc / (count == V{} ? V{} + Acc(1) : count);
      if (finish.has_scale) acc = acc * Acc(finish.scale);
    }
    if (finish.accumulate) acc = Element<Out>::template widened<Acc, kLanes>(previous) + acc;
    return Element<Out>::template rounded<Acc, kLanes>(acc);
  }

  void finish_vector(Out* p, V acc, V count, bool streamed) const {
    const OutBits bits = finished(acc, count, finish.accumulate ? load<OutBits>(p) : OutBits{});
    streamed ? stream(p, bits) : store(p, bits);
  }

  void finish_some(Out* p, V acc, V count, int64_t some) const {
    const OutBits previous = load_some<OutBits, sizeof(Out)>(p, some);
    store_some<OutBits, sizeof(Out)>(p, finished(acc, count, previous), some);
  }

  const Finish& finish;
};

// The elements of a span: rows[r][at] for all r are added to out[at].
template <class In, class Out>
struct Span : Sum<In, Out> {
  using S = Sum<In, Out>;
  using V = typename S::V;
  static constexpr int kLanes = S::kLanes, kTile = kTileVectors * kLanes;

  using Acc = typename S::Acc;

  V count() const { return V{} + Acc(num_rows + this->finish.carried); }

  // kVectors vectors of columns: the accumulators stay in registers while all rows go by, in their order.
  template <int kVectors, bool kPrefetch, bool kStream>
  void sum_tile(int64_t at) const {
    V acc[kVectors] = {};
    if (carry) {
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) acc[k] = load<V>(carry + at + k * kLanes);
    }
    for (int64_t r = 0; r < num_rows; ++r) {
      const In* row = rows[r] + at;
      if constexpr (kPrefetch) {
        for (int line = 0; line < kVectors * kLanes * int(sizeof(In)); line += 64) {
          __builtin_prefetch(reinterpret_cast<const char*>(row) + kPrefetchBytes + line);
        }
      }
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) acc[k] += S::loaded(row + k * kLanes);
    }
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) this->finish_vector(out + at + k * kLanes, acc[k], count(), kStream);
  }

  void sum_some(int64_t at, int64_t some) const {
    V acc = carry ? load_some<V, sizeof(Acc)>(carry + at, some) : V{};
    for (int64_t r = 0; r < num_rows; ++r) {
      acc += S::widened(load_some<typename S::InBits, sizeof(In)>(rows[r] + at, some));
    }
    this->finish_some(out + at, acc, count(), some);
  }

  template <bool kStream>
  void sum(int64_t at, int64_t end) const {
    constexpr int64_t kAhead = kTile + kPrefetchBytes / int64_t(sizeof(In));  // prefetches stay inside the row
    for (; at + kAhead <= end; at += kTile) sum_tile<kTileVectors, true, kStream>(at);
    for (; at + kTile <= end; at += kTile) sum_tile<kTileVectors, false, kStream>(at);
    for (; at + kLanes <= end; at += kLanes) sum_tile<1, false, kStream>(at);
    if (at < end) sum_some(at, end - at);
  }

  const In* const* rows;
  int64_t num_rows;
  const Acc* carry;  // null: the sums start at +0.0
  Out* out;
};

template <class In, class Out>
void sum_span(const void* const* rows, int64_t num_rows, const void* carry, void* out, int64_t count,
              const Finish& finish, bool streamed) {
  using Acc = typename Sum<In, Out>::Acc;
  const Span<In, Out> span{{finish},
                           reinterpret_cast<const In* const*>(rows),
                           num_rows,
                           static_cast<const Acc*>(carry),
                           static_cast<Out*>(out)};
  if (!streamed) return span.template sum<false>(0, count);
  constexpr int64_t kBytes = sizeof(typename Sum<In, Out>::OutBits);
  const int64_t misaligned = reinterpret_cast<uintptr_t>(out) % kBytes;
  int64_t head = misaligned ? (kBytes - misaligned) / int64_t(sizeof(Out)) : 0;
  if (head > count) head = count;
  if (head > 0) span.sum_some(0, head);
  span.template sum<true>(head, count);
  end_streaming();
}

// Accumulators in the first cache, to which the rows are added one after another. That takes a load and a store more
// an add, but nothing where the set of rows changes.
template <class In, class Out>
struct Block : Sum<In, Out> {
  using S = Sum<In, Out>;
  using V = typename S::V;
  using Acc = typename S::Acc;
  static constexpr int kLanes = S::kLanes;

  Block(const Finish& finish, const Acc* carry, int64_t first, int64_t count) : S{finish}, first(first), count(count) {
    __builtin_memset(acc, 0, (count + kLanes) * sizeof(Acc));
    if (carry) __builtin_memcpy(acc, carry + first, count * sizeof(Acc));
    if (finish.mean) {
      for (int64_t i = 0; i < count + kLanes; ++i) rows[i] = Acc(finish.carried);
    }
  }

  void add(const Row& row) {
    const int64_t lo = row.begin > first ? row.begin : first;
    const int64_t hi = row.end < first + count ? row.end : first + count;
    const In* p = static_cast<const In*>(row.data) + (lo - row.begin);
    int64_t at = lo - first;
    const int64_t end = hi - first;
    if (this->finish.mean) {
      for (int64_t i = at; i < end; ++i) rows[i] += 1;
    }
    for (; at + kLanes <= end; at += kLanes, p += kLanes) store(acc + at, load<V>(acc + at) + S::loaded(p));
    // Lanes behind the row's end get 0, which changes no sum: none is -0.0.
    if (at < end)
      store(acc + at, load<V>(acc + at) + S::widened(load_some<typename S::InBits, sizeof(In)>(p, end - at)));
  }

  void finish_all(Out* out) const {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) this->finish_vector(out + i, load<V>(acc + i), contributions(i), false);
    if (i < count) this->finish_some(out + i, load<V>(acc + i), contributions(i), count - i);
  }

  V contributions(int64_t i) const { return this->finish.mean ? load<V>(rows + i) : V{}; }

  int64_t first, count;
  Acc acc[kBlockElements + kLanes];
  Acc rows[kBlockElements + kLanes];  // that contribute; only for a mean
};

template <class In, class Out>
void sum_block(const Row* rows, int64_t num_rows, const void* carry, void* out, int64_t first, int64_t count,
               const Finish& finish) {
  Block<In, Out> block(finish, static_cast<const typename Sum<In, Out>::Acc*>(carry), first, count);
  for (int64_t r = 0; r < num_rows; ++r) {
    if (rows[r].begin < first + count && rows[r].end > first) block.add(rows[r]);
  }
  block.finish_all(static_cast<Out*>(out) + first);
}

// Positions of width 1: lane by lane, a row's values are added where its bits are set.
template <class In, class Out>
struct Masked : Sum<In, Out> {
  using S = Sum<In, Out>;
  using V = typename S::V;
  using Lanes = decltype(V{} != V{});
  using Lane = decltype(Lanes{}[0] + 0);
  static constexpr int kLanes = S::kLanes;

  Lanes selected(int64_t r, int64_t at) const {
    Lanes bit_of_lane{};
    for (int k = 0; k < kLanes; ++k) bit_of_lane[k] = Lane(1) << k;
    return ((Lanes{} + Lane(m.words[r] >> at)) & bit_of_lane) != 0;
  }
  const In* row(int64_t r) const { return static_cast<const In*>(m.data) + r * m.row_stride; }

  template <int kVectors, bool kMean>
  void sum_tile(int64_t at) const {
    V acc[kVectors] = {}, count[kVectors] = {};
    for (int64_t r = 0; r < m.num_rows; ++r) {
#pragma GCC unroll 8
      for (int k = 0; k < kVectors; ++k) {
        const Lanes mask = selected(r, at + k * kLanes);
        acc[k] = mask ? acc[k] + S::loaded(row(r) + at + k * kLanes) : acc[k];
        if constexpr (kMean) count[k] = mask ? count[k] + 1 : count[k];
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) this->finish_vector(out + at + k * kLanes, acc[k], count[k], false);
  }

  void sum_some(int64_t at, int64_t some) const {
    V acc{}, count{};
    for (int64_t r = 0; r < m.num_rows; ++r) {
      const Lanes mask = selected(r, at);
      acc = mask ? acc + S::widened(load_some<typename S::InBits, sizeof(In)>(row(r) + at, some)) : acc;
      count = mask ? count + 1 : count;
    }
    this->finish_some(out + at, acc, count, some);
  }

  template <bool kMean>
  void sum() const {
    int64_t at = 0;
    for (; at + kTileVectors * kLanes <= m.count; at += kTileVectors * kLanes) sum_tile<kTileVectors, kMean>(at);
    for (; at + kLanes <= m.count; at += kLanes) sum_tile<1, kMean>(at);
    if (at < m.count) sum_some(at, m.count - at);
  }

  const MaskedPositions& m;
  Out* out;
};

template <class In, class Out>
void sum_masked(const MaskedPositions& positions, void* out, const Finish& finish) {
  const Masked<In, Out> masked{{finish}, positions, static_cast<Out*>(out)};
  finish.mean ? masked.template sum<true>() : masked.template sum<false>();
}

uint64_t pack(const uint8_t* bytes, int64_t count) {
  uint8_t block[64] = {};
  if (count == 64) return nonzero_bytes(*reinterpret_cast<const uint8_t (*)[64]>(bytes));
  __builtin_memcpy(block, bytes, count);
  return nonzero_bytes(block);
}

template <class In, class Out>
constexpr CpuKernels pair() {
  return {&sum_span<In, Out>, &sum_block<In, Out>, &sum_masked<In, Out>, &pack};
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
      return pair<uint8_t, int64_t>();
    case DType::kBool:
      return pair<Bool, int64_t>();
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
