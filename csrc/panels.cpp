// Linear layers on panels of samples: the kernels by instruction set.

#include "panels.h"

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.h"

namespace recast::panels {

constexpr int64_t kDepth = 256;  // of a block, as in gemm.cpp: sums of the same terms
constexpr int64_t kRows = 120;   // of W at once, at most half as many again: they stay in L2

}  // namespace recast::panels

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "panels_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::panels {

int64_t samples() { return RECAST_CHOOSE(samples)(); }

void pack(const float* x, int64_t rows, int64_t depth, float* into) {
  RECAST_CHOOSE(pack)(x, rows, depth, into);
}

void unpack(const float* x, int64_t rows, int64_t width, float* into) {
  RECAST_CHOOSE(unpack)(x, rows, width, into);
}

void layer(const Weights& weights, const float* x, int64_t panels, float* y) {
  RECAST_CHOOSE(layer)(weights, x, panels, y);
}

}  // namespace recast::panels
