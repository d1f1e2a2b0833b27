// Compiles RECAST_KERNEL (a header) once per instruction set, each into its own namespace
// RECAST_ISA: portable, avx2, avx512, with RECAST_LANES floats in a register. Set RECAST_KERNEL,
// include this, choose with isa.h.
//
// A kernel header defines functions in `namespace recast::<subject>::RECAST_ISA` and calls nothing
// that is compiled elsewhere, so no instruction leaks into code that every machine runs.

#define RECAST_ISA portable
#define RECAST_LANES 4
#include RECAST_KERNEL
#undef RECAST_ISA
#undef RECAST_LANES

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define RECAST_ISA avx2
#define RECAST_LANES 8
#include RECAST_KERNEL
#undef RECAST_ISA
#undef RECAST_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define RECAST_ISA avx512
#define RECAST_LANES 16
#define RECAST_AVX512 1
#include RECAST_KERNEL
#undef RECAST_AVX512
#undef RECAST_ISA
#undef RECAST_LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif

#undef RECAST_KERNEL
