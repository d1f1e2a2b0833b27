// Matrix products on the CPU: which thread computes which part of the result.

#include "gemm.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.h"
#include "parallel.h"

namespace recast::gemm {

constexpr int64_t kDepth = 256;     // of a block: a panel of B and a strip of A stay in L1
constexpr int64_t kColumns = 1024;  // of packed B at once
constexpr int64_t kRows = 120;      // of A at once, at most half as many again: they stay in L2
constexpr int64_t kRoom = kDepth * (kColumns + 32) + kDepth * (kRows + kRows / 2);
constexpr int64_t kSummed = 64;

}  // namespace recast::gemm

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "gemm_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::gemm {
namespace {

// Multiply-adds, and numbers read, below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 19, kWorthThreadsRead = 1 << 16;

float* room() {
  constexpr size_t kLine = 64;  // a register read across two lines costs two reads
  static thread_local std::vector<float> own(static_cast<size_t>(kRoom) + kLine / sizeof(float));
  const auto at = reinterpret_cast<uintptr_t>(own.data());
  return reinterpret_cast<float*>((at + kLine - 1) / kLine * kLine);
}

}  // namespace

void multiply(const Product& p, int threads) {
  const auto part = RECAST_CHOOSE(multiply);
  if (threads <= 1 || p.rows * p.columns * std::max<int64_t>(p.depth, 1) < kWorthThreads)
    return part(p, 0, p.rows, 0, p.columns, room());
  // Whole panels and whole tiles; columns first, since B is then packed once.
  const int64_t panel = isa() == Isa::avx512 ? 32 : 16, tile = 12;
  const int64_t panels = (p.columns + panel - 1) / panel, tiles = (p.rows + tile - 1) / tile;
  const int64_t across = std::min<int64_t>(threads, panels);
  const int64_t down = std::clamp<int64_t>(threads / across, 1, tiles);
  parallel_static(threads, across * down, [&](int64_t k, int) {
    const int64_t i = k / across, j = k % across;
    part(p, std::min(tiles * i / down * tile, p.rows),
         std::min(tiles * (i + 1) / down * tile, p.rows),
         std::min(panels * j / across * panel, p.columns),
         std::min(panels * (j + 1) / across * panel, p.columns), room());
  });
}

void sum_rows(const float* g, int64_t rows, int64_t columns, float* out, bool add, int threads) {
  const auto part = RECAST_CHOOSE(sum_rows);
  const int64_t panels = (columns + 31) / 32;
  if (threads <= 1 || panels < 2 || rows * columns < kWorthThreadsRead)
    return part(g, rows, columns, 0, columns, out, add);
  const int64_t pieces = std::min<int64_t>(threads, panels);
  parallel_static(threads, pieces, [&](int64_t k, int) {
    part(g, rows, columns, std::min(panels * k / pieces * 32, columns),
         std::min(panels * (k + 1) / pieces * 32, columns), out, add);
  });
}

void dots(const float* x, int64_t rows, int64_t depth, const float* w, const float* bias,
          int64_t width, float* out, int threads) {
  const auto part = RECAST_CHOOSE(dots);
  if (threads <= 1 || rows * depth * width < kWorthThreadsRead)
    return part(x, rows, depth, w, bias, width, out);
  parallel_static(threads, threads, [&](int64_t k, int) {
    const int64_t first = rows * k / threads, last = rows * (k + 1) / threads;
    part(x + first * depth, last - first, depth, w, bias, width, out + first * width);
  });
}

void gate(const float* g, const float* y, int64_t count, float* into) {
  RECAST_CHOOSE(gate)(g, y, count, into);
}

}  // namespace recast::gemm
