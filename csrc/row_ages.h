// Optimizers that step all rows of a table, of which few have a gradient (runtime/rows/fading.py
// has the formulas).
#pragma once

#include <cstdint>
#include <vector>

namespace recast::rows {

// Rows that are asked together whether they may still move.
constexpr int64_t kRowsOfBlock = 64;

// How many steps ago each row of a table had its last gradient. Its moments are those of that step.
struct Ages {
  int32_t* last;       // the number of that step; 0: none yet; negative: the row is at rest since
  uint8_t* awake;      // of each block: whether a row may move without a gradient; null: no ages
  const float* fades;  // beta^k for k < known: of the first moment, then of the second, if any
  int64_t known;       // older rows are at rest
  double betas[2];
  bool lerps;   // the first moment goes to 0 by differences: if it is infinite, it becomes NaN
  int32_t now;  // the number of the current step, from 1
  bool wake;    // whether rows at rest may move again
};

// A table whose moments are to be read: (rows, dim) fp32, with `stride` numbers between rows.
struct Moments {
  int count;  // 1 or 2
  float* data[2];
  int64_t stride[2];
  int64_t rows, dim;
};

// Brings all moments to step `ages.now`; the ages stay as they are.
void settle(const Moments& moments, const Ages& ages, int threads);

// The ages of moments that are those of step `ages.now`.
void begin(const Moments& moments, const Ages& ages, int threads);

}  // namespace recast::rows
