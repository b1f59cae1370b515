#pragma once
// Vector types, float bits, 16-bit formats and arithmetic intrinsics of CUDA C++ as C++ functions.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define VT_VECTOR(T, name, bytes2, bytes4)                                                     \
  struct name##2 { alignas(bytes2) T x; T y; };                                                \
  struct name##3 { T x, y, z; };                                                               \
  struct name##4 { alignas(bytes4) T x; T y, z, w; };                                          \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                   \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                           \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VT_VECTOR(signed char, char, 2, 4)
VT_VECTOR(unsigned char, uchar, 2, 4)
VT_VECTOR(short, short, 4, 8)
VT_VECTOR(unsigned short, ushort, 4, 8)
VT_VECTOR(int, int, 8, 16)
VT_VECTOR(float, float, 8, 16)
VT_VECTOR(double, double, 16, 16)
VT_VECTOR(long long, longlong, 16, 16)
VT_VECTOR(unsigned long long, ulonglong, 16, 16)
struct uint2 { alignas(8) unsigned x; unsigned y; };
struct uint4 { alignas(16) unsigned x; unsigned y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulation {
template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of one size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emulation

inline float __uint_as_float(unsigned v) { return emulation::same_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return emulation::same_bits<unsigned>(v); }
inline float __int_as_float(int v) { return emulation::same_bits<float>(v); }
inline int __float_as_int(float v) { return emulation::same_bits<int>(v); }
inline double __longlong_as_double(long long v) { return emulation::same_bits<double>(v); }
inline long long __double_as_longlong(double v) { return emulation::same_bits<long long>(v); }

namespace emulation {

// ---- 16-bit formats, to nearest even

inline float widen_bf16(unsigned bits) { return same_bits<float>(bits << 16); }
inline unsigned narrow_bf16(float value) {
  const unsigned bits = same_bits<unsigned>(value);
  if (value != value) return 0x7fffu;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline float widen_f16(unsigned bits) {
  const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return same_bits<float>(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  return same_bits<float>(same_bits<unsigned>(same_bits<float>(rest << 13) * 0x1p112f) | sign);
}
inline unsigned narrow_f16(float value) {
  const unsigned bits = same_bits<unsigned>(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return 0x7fffu;
  if (size >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more
  if (size < 0x38800000u)                          // below 2^-14: units of 2^-24 by the rounding of 0.5 + x
    return sign | (same_bits<unsigned>(same_bits<float>(size) + 0.5f) - 0x3f000000u);
  return sign | ((size - 0x38000000u + 0xfffu + (size >> 13 & 1)) >> 13);
}
template <bool f16>
inline float widen_half(unsigned bits) { return f16 ? widen_f16(bits & 0xffffu) : widen_bf16(bits & 0xffffu); }
template <bool f16>
inline unsigned narrow_half(float value) { return f16 ? narrow_f16(value) : narrow_bf16(value); }

// The double as a float whose later rounding to fewer bits is that of the double (round to odd).
inline float rounded_to_odd(double value) {
  float near = static_cast<float>(value);
  if (static_cast<double>(near) == value || value != value || std::isinf(near)) return near;
  if (std::fabs(static_cast<double>(near)) > std::fabs(value)) near = std::nextafterf(near, 0.0f);
  return same_bits<float>(same_bits<unsigned>(near) | 1u);
}

}  // namespace emulation

// ---- arithmetic

template <class A, class B>
constexpr auto min(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr auto max(A a, B b) -> std::common_type_t<A, B> {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
  else return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
inline float __frsqrt_rn(float a) { return rsqrtf(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __exp10f(float a) { return static_cast<float>(std::pow(10.0, static_cast<double>(a))); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __saturatef(float a) { return a != a ? 0.0f : std::fmin(std::fmax(a, 0.0f), 1.0f); }
inline float __int2float_rn(int a) { return static_cast<float>(a); }
inline float __uint2float_rn(unsigned a) { return static_cast<float>(a); }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return static_cast<int>(a); }
inline unsigned __float2uint_rn(float a) { return static_cast<unsigned>(std::nearbyint(a)); }
inline unsigned __float2uint_rz(float a) { return static_cast<unsigned>(a); }

// ---- bits

inline int __clz(int v) { return v ? __builtin_clz(static_cast<unsigned>(v)) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(static_cast<unsigned long long>(v)) : 64; }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline unsigned __brev(unsigned v) {
  unsigned turned = 0;
  for (int i = 0; i < 32; ++i) turned |= (v >> i & 1) << (31 - i);
  return turned;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<long long>(a) * b >> 32); }
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (by & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (by & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i) & 15u, byte = static_cast<unsigned>(both >> (8 * (pick & 7))) & 0xffu;
    out |= (pick & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
  }
  return out;
}
