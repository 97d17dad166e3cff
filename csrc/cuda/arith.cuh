// The arithmetic of a sum, shared by every CUDA kernel: load up to 16 bytes, convert, add in row order, finish, store.
//
// A "vector" is kVec<T> consecutive elements, what one thread holds of one row: 16 bytes, or 8 elements of a one-byte
// type. Everything here is IEEE with explicit rounding intrinsics, so no compiler flag can change a bit of it.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../row_table.h"

namespace shardsum {

struct Bool {
  uint8_t v;  // any nonzero byte counts as 1
};

template <typename T>
struct Accumulator {
  using type = int64_t;
};
template <>
struct Accumulator<__half> {
  using type = float;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
};
template <>
struct Accumulator<float> {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulator<T>::type;

template <typename T>
constexpr bool accumulates_in_float_v = std::is_same_v<acc_t<T>, float>;

template <typename T>
constexpr int kVec = sizeof(T) > 1 ? 16 / int(sizeof(T)) : 8;
template <typename T>
constexpr int kVecBytes = kVec<T> * int(sizeof(T));

// The bits of one vector.
template <typename T>
struct alignas(kVecBytes<T>) Raw {
  uint32_t w[kVecBytes<T> / 4];
};

__device__ inline float to_acc(float v) { return v; }
__device__ inline float to_acc(__half v) { return __half2float(v); }
__device__ inline float to_acc(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline double to_acc(double v) { return v; }
__device__ inline int64_t to_acc(Bool v) { return v.v != 0; }
template <typename T>
__device__ inline int64_t to_acc(T v) {
  return static_cast<int64_t>(v);
}

// Element j of a vector in the accumulator's type (exact).
template <typename T>
__device__ inline acc_t<T> element(const Raw<T>& raw, int j) {
  if constexpr (sizeof(T) == 8) {
    const uint64_t bits = (uint64_t(raw.w[2 * j + 1]) << 32) | raw.w[2 * j];
    T v;
    memcpy(&v, &bits, sizeof(T));
    return to_acc(v);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // the upper half of a float: one instruction
    const uint32_t word = raw.w[j / 2];
    return __uint_as_float(j % 2 ? word & 0xffff0000u : word << 16);
  } else {
    constexpr int kPerWord = 4 / sizeof(T);
    const uint32_t bits = raw.w[j / kPerWord] >> (j % kPerWord * 8 * sizeof(T));
    T v;
    memcpy(&v, &bits, sizeof(T));
    return to_acc(v);
  }
}

__device__ inline float add(float a, float b) { return __fadd_rn(a, b); }
__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline int64_t add(int64_t a, int64_t b) { return int64_t(uint64_t(a) + uint64_t(b)); }

// acc += raw. A vector of zeros leaves every bit as it is: an accumulator that started at +0.0 is never -0.0, so rows
// that do not contribute may be added as zeros.
template <typename T>
__device__ inline void add_vector(acc_t<T> (&acc)[kVec<T>], const Raw<T>& raw) {
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j) acc[j] = add(acc[j], element(raw, j));
}

// One aligned vector, read once and by nobody else (not kept in L1), or zeros where `valid` is false.
template <typename T>
__device__ inline Raw<T> load_streaming(const void* p, bool valid) {
  Raw<T> r;
  if constexpr (kVecBytes<T> == 16) {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
        "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&r"(r.w[0]), "=&r"(r.w[1]), "=&r"(r.w[2]), "=&r"(r.w[3])
        : "l"(p), "r"(int(valid)));
  } else {
    asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "@p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n\t}"
        : "=&r"(r.w[0]), "=&r"(r.w[1])
        : "l"(p), "r"(int(valid)));
  }
  return r;
}

// The part [lo, hi) of a vector of any alignment; elements outside are zeros and not read.
template <typename T>
__device__ inline Raw<T> load_part(const void* vector, int lo, int hi) {
  Raw<T> r{};
  const T* p = static_cast<const T*>(vector);
#pragma unroll
  for (int j = 0; j < kVec<T>; ++j) {
    if (lo <= j && j < hi) {
      if constexpr (sizeof(T) == 8) {
        const uint2 bits = __ldg(reinterpret_cast<const uint2*>(p + j));
        r.w[2 * j] = bits.x;
        r.w[2 * j + 1] = bits.y;
      } else if constexpr (sizeof(T) == 4) {
        r.w[j] = __ldg(reinterpret_cast<const uint32_t*>(p + j));
      } else if constexpr (sizeof(T) == 2) {
        r.w[j / 2] |= uint32_t(__ldg(reinterpret_cast<const uint16_t*>(p + j))) << (j % 2 * 16);
      } else {
        r.w[j / 4] |= uint32_t(__ldg(reinterpret_cast<const uint8_t*>(p + j))) << (j % 4 * 8);
      }
    }
  }
  return r;
}

// A vector of which [lo, hi) is valid, with the widest loads that its address allows.
template <typename T>
__device__ inline Raw<T> load_any(const void* vector, int lo, int hi) {
  if (lo <= 0 && hi >= kVec<T>) {
    const auto address = reinterpret_cast<uintptr_t>(vector);
    if (address % kVecBytes<T> == 0) return load_streaming<T>(vector, true);
    if (sizeof(T) < 4 && address % 4 == 0) {
      Raw<T> r;
#pragma unroll
      for (int i = 0; i < kVecBytes<T> / 4; ++i) r.w[i] = __ldg(static_cast<const uint32_t*>(vector) + i);
      return r;
    }
  }
  return load_part<T>(vector, lo, hi);
}

// One element, or zero. Predicated, not branched around: the loads of several rows overlap.
template <typename T>
__device__ inline T load_element(const T* p, bool valid) {
  T value;
  if constexpr (sizeof(T) == 8) {
    uint64_t bits;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b64 %0, 0;\n\t@p ld.global.nc.b64 %0, [%1];\n\t}"
        : "=&l"(bits)
        : "l"(p), "r"(int(valid)));
    memcpy(&value, &bits, sizeof(T));
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.global.nc.b32 %0, [%1];\n\t}"
        : "=&r"(bits)
        : "l"(p), "r"(int(valid)));
    memcpy(&value, &bits, sizeof(T));
  } else {
    uint16_t bits;
    if constexpr (sizeof(T) == 2) {
      asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b16 %0, 0;\n\t@p ld.global.nc.b16 %0, [%1];\n\t}"
          : "=&h"(bits)
          : "l"(p), "r"(int(valid)));
    } else {
      asm("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %2, 0;\n\tmov.b16 %0, 0;\n\t@p ld.global.nc.b8 %0, [%1];\n\t}"
          : "=&h"(bits)
          : "l"(p), "r"(int(valid)));
    }
    memcpy(&value, &bits, sizeof(T));
  }
  return value;
}

// Asynchronous copies into this thread's own slot of shared memory: zeros where not valid. A thread waits only for its
// own copies, and only its own copies write where it reads.
template <typename T>
__device__ inline void copy_async(Raw<T>* to, const void* from, bool valid) {
  const auto slot = static_cast<unsigned>(__cvta_generic_to_shared(to));
  if constexpr (kVecBytes<T> == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(slot), "l"(from), "r"(valid ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(slot), "l"(from), "r"(valid ? 8 : 0) : "memory");
  }
}

__device__ inline void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all but the last N groups have arrived.
template <int N>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

template <int kBytes>
__device__ inline void copy_small(unsigned slot, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(slot), "l"(from), "n"(kBytes),
               "r"(valid ? kBytes : 0)
               : "memory");
}

// A vector of any alignment of which [lo, hi) is valid. Elements of four or more bytes stay asynchronous; narrower ones
// do where the address is a multiple of four and the vector is whole.
template <typename T>
__device__ inline void copy_any(Raw<T>* to, const void* from, int lo, int hi) {
  const auto slot = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const auto address = reinterpret_cast<uintptr_t>(from);
  const bool whole = lo <= 0 && hi >= kVec<T>, none = lo >= kVec<T> || hi <= 0;
  const char* bytes = static_cast<const char*>(from);
  if (none || (whole && address % kVecBytes<T> == 0)) {
    copy_async(to, from, !none);
  } else if constexpr (sizeof(T) >= 4) {
#pragma unroll
    for (int j = 0; j < kVec<T>; ++j)
      copy_small<sizeof(T)>(slot + j * sizeof(T), bytes + j * sizeof(T), lo <= j && j < hi);
  } else if (whole && address % 4 == 0) {
#pragma unroll
    for (int j = 0; j < kVecBytes<T> / 4; ++j) copy_small<4>(slot + j * 4, bytes + j * 4, true);
  } else {
    *to = load_part<T>(from, lo, hi);
  }
}

// What happens to an accumulator after the last row, and where the result goes.
struct Epilogue {
  void* out;
  DType out_dtype;
  bool plain;   // none of the following
  bool direct;  // plain, and in the rows' dtype
  bool mean, has_scale, accumulate;
  double scale;
  const void* start;  // accumulators at which the first launch's sums start; null: +0.0
  int carried;        // contributions to each of them
  // Sums of several launches: accumulators and counts of contributions travel between them unrounded.
  void* carry;
  int32_t* carry_count;  // null unless mean
  bool carry_in, carry_out;
};

__device__ inline float divide(float a, int n) { return __fdiv_rn(a, float(n)); }
__device__ inline double divide(double a, int n) { return __ddiv_rn(a, double(n)); }
__device__ inline int64_t divide(int64_t a, int) { return a; }
__device__ inline float multiply(float a, double s) { return __fmul_rn(a, __double2float_rn(s)); }
__device__ inline double multiply(double a, double s) { return __dmul_rn(a, s); }
__device__ inline int64_t multiply(int64_t a, double) { return a; }

template <typename Out>
__device__ inline Out round_to(float v) {
  if constexpr (sizeof(Out) == 4)
    return v;
  else if constexpr (std::is_same_v<Out, __half>)
    return __float2half_rn(v);
  else
    return __float2bfloat16_rn(v);
}
template <typename Out>
__device__ inline Out round_to(double v) {
  if constexpr (sizeof(Out) == 4)
    return __double2float_rn(v);
  else
    return v;
}
template <typename Out>
__device__ inline Out round_to(int64_t v) {
  return v;
}

// A whole aligned vector of results.
template <typename Out, typename A, int V>
__device__ inline void store_vector(Out* out, const A (&acc)[V]) {
  constexpr int kBytes = V * int(sizeof(Out));
  constexpr int kPiece = kBytes < 16 ? kBytes : 16;
  alignas(16) Out values[V];
#pragma unroll
  for (int j = 0; j < V; ++j) values[j] = round_to<Out>(acc[j]);
#pragma unroll
  for (int b = 0; b < kBytes; b += kPiece) {
    char* to = reinterpret_cast<char*>(out) + b;
    const char* from = reinterpret_cast<const char*>(values) + b;
    if constexpr (kPiece == 16)
      __stcs(reinterpret_cast<uint4*>(to), *reinterpret_cast<const uint4*>(from));
    else
      __stcs(reinterpret_cast<uint2*>(to), *reinterpret_cast<const uint2*>(from));
  }
}

// The elements [i, i + num) of the output, num <= V. Whole vectors go out in 16-byte pieces where aligned.
template <typename Out, typename A, int V>
__device__ inline void store(const Epilogue& e, int64_t i, int num, A (&acc)[V]) {
  Out* out = static_cast<Out*>(e.out) + i;
  if (!e.plain && e.accumulate) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < num) acc[j] = add(to_acc(out[j]), acc[j]);
  }
  constexpr int kPiece = V * int(sizeof(Out)) < 16 ? V * int(sizeof(Out)) : 16;
  if (V > 1 && num == V && reinterpret_cast<uintptr_t>(out) % kPiece == 0) {
    store_vector(out, acc);
  } else {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < num) out[j] = round_to<Out>(acc[j]);
  }
}

// Where an accumulator starts (it is +0.0 already): goes on from what the previous launch left, or another process.
template <typename A, int V>
__device__ inline void begin_sum(const Epilogue& e, int64_t i, int num, A (&acc)[V]) {
  const A* from = static_cast<const A*>(e.carry_in ? e.carry : e.start);
  if (from == nullptr) return;
  from += i;
  constexpr int kPiece = 16 / int(sizeof(A));
  if constexpr (V % kPiece == 0) {
    if (num == V && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
      for (int j = 0; j < V; j += kPiece) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from + j);
        memcpy(&acc[j], &bits, 16);
      }
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < V; ++j)
    if (j < num) acc[j] = from[j];
}

// Divide and scale. False where the sum goes on in another launch and was put away for it.
template <typename A, int V>
__device__ inline bool combine(const Epilogue& e, int64_t i, int num, A (&acc)[V], int (&count)[V]) {
  if (e.mean && e.carry_in) {
#pragma unroll
    for (int j = 0; j < V; ++j)
      if (j < num) count[j] += e.carry_count[i + j];
  }
  if (e.carry_out) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (j < num) static_cast<A*>(e.carry)[i + j] = acc[j];
      if (j < num && e.mean) e.carry_count[i + j] = count[j];
    }
    return false;
  }
  if (e.mean) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      count[j] += e.carried;
      acc[j] = count[j] > 0 ? divide(acc[j], count[j]) : A(0);
    }
  }
  if (e.has_scale) {
#pragma unroll
    for (int j = 0; j < V; ++j) acc[j] = multiply(acc[j], e.scale);
  }
  return true;
}

// Divide, scale, accumulate, round, store: the elements [i, i + num), count[j] of them contributions.
template <typename A, int V>
__device__ inline void finish(const Epilogue& e, int64_t i, int num, A (&acc)[V], int (&count)[V]) {
  if (!e.plain && !combine(e, i, num, acc, count)) return;
  if constexpr (std::is_same_v<A, float>) {
    if (e.out_dtype == DType::kFloat32)
      store<float>(e, i, num, acc);
    else if (e.out_dtype == DType::kBFloat16)
      store<__nv_bfloat16>(e, i, num, acc);
    else
      store<__half>(e, i, num, acc);
  } else if constexpr (std::is_same_v<A, double>) {
    if (e.out_dtype == DType::kFloat64)
      store<double>(e, i, num, acc);
    else
      store<float>(e, i, num, acc);
  } else {
    store<int64_t>(e, i, num, acc);
  }
}

template <typename T>
struct Type {
  using type = T;
};

// f(Type<T>{}) for the C++ type of `dtype`.
template <typename F>
int dispatch(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(Type<__half>{});
    case DType::kBFloat16:
      return f(Type<__nv_bfloat16>{});
    case DType::kFloat32:
      return f(Type<float>{});
    case DType::kFloat64:
      return f(Type<double>{});
    case DType::kUInt8:
      return f(Type<uint8_t>{});
    case DType::kInt8:
      return f(Type<int8_t>{});
    case DType::kInt16:
      return f(Type<int16_t>{});
    case DType::kInt32:
      return f(Type<int32_t>{});
    case DType::kInt64:
      return f(Type<int64_t>{});
    case DType::kBool:
      return f(Type<Bool>{});
  }
  return 1;  // cudaErrorInvalidValue
}

}  // namespace shardsum
