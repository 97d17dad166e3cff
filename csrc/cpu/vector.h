// Vectors of accumulators, and how each dtype is loaded into and stored from one.
//
// Part of kernels.cpp, which is compiled with other flags for each instruction set: everything here has internal
// linkage, and no standard header with inline functions is included, so that no such function, compiled for a
// newer processor, can be the one copy that the linker keeps for all.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <class T, int kLanes>
using Vec = typename VectorOf<T, kLanes>::type;

template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Halves without an instruction for them: all cases computed, the right one selected. Signed integers are compared and
// converted: SSE2 has neither for unsigned ones.
template <int kLanes>
inline Vec<float, kLanes> half_to_float(Vec<uint16_t, kLanes> half) {
  using Int = Vec<int32_t, kLanes>;
  using UInt = Vec<uint32_t, kLanes>;
  using F = Vec<float, kLanes>;
  const Int h = __builtin_convertvector(half, Int), magnitude = h & 0x7fff;
  const Int small = (Int)(__builtin_convertvector(magnitude, F) * 0x1p-24f);  // zero and denormals, exactly
  const Int normal = (magnitude << 13) + (112 << 23);
  const Int special = (magnitude << 13) | 0x7f800000;  // infinity, NaN
  const Int value = magnitude < 0x400 ? small : magnitude < 0x7c00 ? normal : special;
  return (F)((UInt)value | (UInt)(h & 0x8000) << 16);
}

template <int kLanes>
inline Vec<uint16_t, kLanes> float_to_half(Vec<float, kLanes> f) {
  using Int = Vec<int32_t, kLanes>;
  using UInt = Vec<uint32_t, kLanes>;  // in which lanes that are not selected may wrap
  using F = Vec<float, kLanes>;
  const UInt bits = (UInt)f, magnitude = bits & 0x7fffffff;
  // Below 2^-14 the halves are 2^-24 apart, as floats from 0.5 on are: adding 0.5 rounds.
  const UInt small = (UInt)((F)magnitude + 0.5f) - 0x3f000000;
  const UInt normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;  // may carry into infinity
  const UInt infinity = UInt{} + 0x7c00, nan = UInt{} + 0x7e00;
  const Int signless = (Int)magnitude;
  const UInt beyond = signless > 0x7f800000 ? nan : infinity;  // from 65536 on
  const UInt value = signless < 0x38800000 ? small : signless < 0x47800000 ? normal : beyond;
  return __builtin_convertvector(value | (bits >> 16 & 0x8000), Vec<uint16_t, kLanes>);
}

// Element<T>: the accumulator of inputs of T, the Bits that memory holds, and the conversions of whole vectors.
template <class T>
struct Element {  // integers and bool: added unsigned, so that they wrap
  using Acc = uint64_t;
  using Bits = T;
  template <class, int kLanes>
  static Vec<uint64_t, kLanes> widened(Vec<T, kLanes> v) {
    if constexpr (sizeof(T) == 1) {  // step by step: GCC 12 takes the whole way lane by lane
      return Element<int16_t>::widened<uint64_t, kLanes>(__builtin_convertvector(v, Vec<int16_t, kLanes>));
    } else if constexpr (sizeof(T) == 2) {
      return Element<int32_t>::widened<uint64_t, kLanes>(__builtin_convertvector(v, Vec<int32_t, kLanes>));
    } else {
      return (Vec<uint64_t, kLanes>)__builtin_convertvector(v, Vec<int64_t, kLanes>);
    }
  }
  template <class, int kLanes>
  static Vec<T, kLanes> rounded(Vec<uint64_t, kLanes> v) {
    return (Vec<T, kLanes>)v;
  }
};

// One byte; any that is not 0 counts as 1.
struct Bool {
  uint8_t bits;
};
template <>
struct Element<Bool> {
  using Acc = uint64_t;
  using Bits = uint8_t;
  template <class, int kLanes>
  static Vec<uint64_t, kLanes> widened(Vec<uint8_t, kLanes> v) {
    const Vec<uint8_t, kLanes> one = Vec<uint8_t, kLanes>{} + 1;
    return Element<uint8_t>::widened<uint64_t, kLanes>(v < one ? v : one);
  }
};

template <class T>
struct Float {
  using Acc = T;
  using Bits = T;
  template <class Wide, int kLanes>
  static Vec<Wide, kLanes> widened(Vec<T, kLanes> v) {
    return __builtin_convertvector(v, Vec<Wide, kLanes>);
  }
  template <class Wide, int kLanes>
  static Vec<T, kLanes> rounded(Vec<Wide, kLanes> v) {
    return __builtin_convertvector(v, Vec<T, kLanes>);
  }
};
template <>
struct Element<float> : Float<float> {};
template <>
struct Element<double> : Float<double> {};

// GCC 12 takes two conversions of half a vector where these are one instruction.
template <int kLanes>
inline Vec<uint32_t, kLanes> zero_extended(Vec<uint16_t, kLanes> v) {
#if defined(__AVX512F__)
  return bits_of<Vec<uint32_t, kLanes>>(_mm512_maskz_cvtepu16_epi32(0xffff, bits_of<__m256i>(v)));
#elif defined(__AVX2__)
  return bits_of<Vec<uint32_t, kLanes>>(_mm256_cvtepu16_epi32(bits_of<__m128i>(v)));
#else
  return __builtin_convertvector(v, Vec<uint32_t, kLanes>);
#endif
}
template <int kLanes>
inline Vec<uint16_t, kLanes> truncated(Vec<uint32_t, kLanes> v) {
#if defined(__AVX512F__)
  return bits_of<Vec<uint16_t, kLanes>>(_mm512_maskz_cvtepi32_epi16(0xffff, bits_of<__m512i>(v)));
#else
  return __builtin_convertvector(v, Vec<uint16_t, kLanes>);
#endif
}

struct BFloat16 {
  uint16_t bits;
};
template <>
struct Element<BFloat16> {
  using Acc = float;
  using Bits = uint16_t;
  template <class, int kLanes>
  static Vec<float, kLanes> widened(Vec<uint16_t, kLanes> v) {
    return (Vec<float, kLanes>)(zero_extended<kLanes>(v) << 16);
  }
  template <class, int kLanes>
  static Vec<uint16_t, kLanes> rounded(Vec<float, kLanes> v) {
    const auto u = (Vec<uint32_t, kLanes>)v;
    const auto nearest_even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
    const Vec<uint32_t, kLanes> nan = Vec<uint32_t, kLanes>{} + 0x7fc0;
    return truncated<kLanes>(v != v ? nan : nearest_even);
  }
};

struct Half {
  uint16_t bits;
};
template <>
struct Element<Half> {
  using Acc = float;
  using Bits = uint16_t;
  template <class, int kLanes>
  static Vec<float, kLanes> widened(Vec<uint16_t, kLanes> v) {
#if defined(__AVX512F__)
    return bits_of<Vec<float, kLanes>>(_mm512_maskz_cvtph_ps(0xffff, bits_of<__m256i>(v)));
#elif defined(__AVX2__)
    return bits_of<Vec<float, kLanes>>(_mm256_cvtph_ps(bits_of<__m128i>(v)));
#else
    return half_to_float<kLanes>(v);
#endif
  }
  template <class, int kLanes>
  static Vec<uint16_t, kLanes> rounded(Vec<float, kLanes> v) {
#if defined(__AVX512F__)
    return bits_of<Vec<uint16_t, kLanes>>(_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    return bits_of<Vec<uint16_t, kLanes>>(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    return float_to_half<kLanes>(v);
#endif
  }
};

// A vector at any address.
template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
inline void store(void* p, const V& v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// The first `count` lanes, fewer than all; the others are 0. kSize: bytes of a lane.
template <class V, int kSize>
inline V load_some(const void* p, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t lanes = (uint32_t(1) << count) - 1;
  if constexpr (kSize == 8 && sizeof(V) == 64) return bits_of<V>(_mm512_maskz_loadu_epi64(lanes, p));
  if constexpr (kSize == 4 && sizeof(V) == 64) return bits_of<V>(_mm512_maskz_loadu_epi32(lanes, p));
  if constexpr (kSize == 4 && sizeof(V) == 32) return bits_of<V>(_mm256_maskz_loadu_epi32(lanes, p));
  if constexpr (kSize == 2 && sizeof(V) == 32) return bits_of<V>(_mm256_maskz_loadu_epi16(lanes, p));
#endif
  V v{};
  __builtin_memcpy(&v, p, count * kSize);
  return v;
}

template <class V, int kSize>
inline void store_some(void* p, const V& v, int64_t count) {
#if defined(__AVX512F__)
  const uint32_t lanes = (uint32_t(1) << count) - 1;
  if constexpr (kSize == 8 && sizeof(V) == 64) return _mm512_mask_storeu_epi64(p, lanes, bits_of<__m512i>(v));
  if constexpr (kSize == 4 && sizeof(V) == 64) return _mm512_mask_storeu_epi32(p, lanes, bits_of<__m512i>(v));
  if constexpr (kSize == 4 && sizeof(V) == 32) return _mm256_mask_storeu_epi32(p, lanes, bits_of<__m256i>(v));
  if constexpr (kSize == 2 && sizeof(V) == 32) return _mm256_mask_storeu_epi16(p, lanes, bits_of<__m256i>(v));
#endif
  __builtin_memcpy(p, &v, count * kSize);
}

// Past the caches where the processor can; p is aligned to the vector's size.
template <class V>
inline void stream(void* p, const V& v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return _mm512_stream_si512(static_cast<__m512i*>(p), bits_of<__m512i>(v));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return _mm256_stream_si256(static_cast<__m256i*>(p), bits_of<__m256i>(v));
  if constexpr (sizeof(V) == 16) return _mm_stream_si128(static_cast<__m128i*>(p), bits_of<__m128i>(v));
#endif
  store(p, v);
}

// Streamed stores come before any later store.
inline void end_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Bit i: whether byte i is not 0.
inline uint64_t nonzero_bytes(const uint8_t (&bytes)[64]) {
#if defined(__AVX512BW__)
  const __m512i v = load<__m512i>(bytes);
  return _mm512_test_epi8_mask(v, v);
#elif defined(__AVX2__)
  uint64_t zeros = 0;
  for (int i = 0; i < 2; ++i) {
    const __m256i equal = _mm256_cmpeq_epi8(load<__m256i>(bytes + 32 * i), _mm256_setzero_si256());
    zeros |= uint64_t(uint32_t(_mm256_movemask_epi8(equal))) << (32 * i);
  }
  return ~zeros;
#else
  uint64_t word = 0;
  for (int i = 0; i < 64; ++i) word |= uint64_t(bytes[i] != 0) << i;
  return word;
#endif
}

}  // namespace
