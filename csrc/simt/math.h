// Device functions on numbers. The approximate ones of the device are exact here.
#pragma once

#include "simt/language.h"

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }

inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= (x >> bit & 1u) << (31 - bit);
  return reversed;
}

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
  by &= 31;
  return by == 0 ? high : high << by | low >> (32 - by);
}

inline float __int_as_float(int x) { return simt::same_bits<float>(x); }
inline int __float_as_int(float x) { return simt::same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return simt::same_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return simt::same_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return simt::same_bits<double>(x); }
inline long long __double_as_longlong(double x) { return simt::same_bits<long long>(x); }

inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
// What the compiler may not contract into a fused multiply-add.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
