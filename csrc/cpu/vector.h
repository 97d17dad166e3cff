// Vectors of accumulators, and how each dtype is loaded into and stored from one.
//
// Part of kernels.cpp, which is compiled with other flags for each instruction set: everything here has internal
// linkage, and no standard header with inline functions is included, so that no such function, compiled for a
// newer processor, can be the one copy that the linker keeps for all.
#pragma once
#include <stddef.h>
#include <stdint.h>
#if defined(__AVX2__) || defined(__AVX512F__)
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

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T, int kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <class T, int kLanes>
using Vec = typename VectorOf<T, kLanes>::type;

// The accumulator of each input dtype (integers wrap, so they are added unsigned).
template <class T>
struct AccOf {
  using type = uint64_t;
};
template <>
struct AccOf<Half> {
  using type = float;
};
template <>
struct AccOf<BFloat16> {
  using type = float;
};
template <>
struct AccOf<float> {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};

template <class To, class From>
inline To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class V>
inline V load_bytes(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff;
  if (exponent == 31) return bits_of<float>(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) {  // zero or denormal: exact in fp32
    const float magnitude = float(fraction) * 0x1p-24f;
    return bits_of<float>(sign | bits_of<uint32_t>(magnitude));
  }
  return bits_of<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float f) {
  const uint32_t u = bits_of<uint32_t>(f), magnitude = u & 0x7fffffff;
  const uint16_t sign = uint16_t(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return sign | 0x7e00;
  if (magnitude >= 0x47800000) return sign | 0x7c00;  // 65536 and more
  if (magnitude < 0x38800000) {                       // below 2^-14: to the nearest multiple of 2^-24
    const float shifted = bits_of<float>(magnitude) + 0.5f;  // the addition rounds to even at 2^-24
    return sign | uint16_t(bits_of<uint32_t>(shifted) - 0x3f000000);
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return sign | uint16_t((rounded - 0x38000000) >> 13);  // a carry into the exponent gives 65520 -> infinity
}

// Load<T>::vector(p): kVectorBytes / sizeof(accumulator) elements as accumulators. Any alignment.
template <class T>
struct Load {  // integers, bool
  static constexpr int kLanes = kVectorBytes / 8;
  static Vec<uint64_t, kLanes> vector(const T* p) {
    const auto wide = __builtin_convertvector(load_bytes<Vec<T, kLanes>>(p), Vec<int64_t, kLanes>);
    return (Vec<uint64_t, kLanes>)wide;
  }
};
template <>
struct Load<double> {
  static Vec<double, kVectorBytes / 8> vector(const double* p) { return load_bytes<Vec<double, kVectorBytes / 8>>(p); }
};
template <>
struct Load<float> {
  static Vec<float, kVectorBytes / 4> vector(const float* p) { return load_bytes<Vec<float, kVectorBytes / 4>>(p); }
};
template <>
struct Load<BFloat16> {
  static constexpr int kLanes = kVectorBytes / 4;
  static Vec<float, kLanes> vector(const BFloat16* p) {
    const auto wide = __builtin_convertvector(load_bytes<Vec<uint16_t, kLanes>>(p), Vec<uint32_t, kLanes>);
    return (Vec<float, kLanes>)(wide << 16);
  }
};
template <>
struct Load<Half> {
  static constexpr int kLanes = kVectorBytes / 4;
  static Vec<float, kLanes> vector(const Half* p) {
#if defined(__AVX512F__)
    return (Vec<float, kLanes>)_mm512_maskz_cvtph_ps(0xffff, load_bytes<__m256i>(p));
#elif defined(__AVX2__)
    return (Vec<float, kLanes>)_mm256_cvtph_ps(load_bytes<__m128i>(p));
#else
    Vec<float, kLanes> v;
    for (int k = 0; k < kLanes; ++k) v[k] = half_to_float(p[k].bits);
    return v;
#endif
  }
};

// Rounded(v, T*): the accumulators rounded once to T, as a vector of T's bits.
template <int kLanes>
inline Vec<float, kLanes> rounded(Vec<float, kLanes> v, float*) {
  return v;
}
template <int kLanes>
inline Vec<float, kLanes> rounded(Vec<double, kLanes> v, float*) {
  return __builtin_convertvector(v, Vec<float, kLanes>);
}
template <int kLanes>
inline Vec<double, kLanes> rounded(Vec<double, kLanes> v, double*) {
  return v;
}
template <int kLanes>
inline Vec<uint64_t, kLanes> rounded(Vec<uint64_t, kLanes> v, int64_t*) {
  return v;
}
template <int kLanes>
inline Vec<uint16_t, kLanes> rounded(Vec<float, kLanes> v, BFloat16*) {
  const auto u = (Vec<uint32_t, kLanes>)v;
  const auto nearest_even = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const Vec<uint32_t, kLanes> nan = Vec<uint32_t, kLanes>{} + 0x7fc0;
  return __builtin_convertvector(v != v ? nan : nearest_even, Vec<uint16_t, kLanes>);
}
template <int kLanes>
inline Vec<uint16_t, kLanes> rounded(Vec<float, kLanes> v, Half*) {
#if defined(__AVX512F__)
  return bits_of<Vec<uint16_t, kLanes>>(_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  return bits_of<Vec<uint16_t, kLanes>>(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  Vec<uint16_t, kLanes> h;
  for (int k = 0; k < kLanes; ++k) h[k] = float_to_half(v[k]);
  return h;
#endif
}

}  // namespace
