// each_isa.h for kernels that must round alike on all instruction sets: a * b + c stays two
// operations.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-math-errno")
#endif

#include "each_isa.h"

#if !defined(__clang__)
#pragma GCC pop_options
#endif
