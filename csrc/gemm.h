// Products of float32 matrices on the CPU, with the other operations of a linear layer.
#pragma once

#include <cstdint>

namespace recast::gemm {

// C = A B, then + bias, zero where the gate is not positive, relu.
struct Product {
  int64_t rows, columns, depth;
  const float* a;
  int64_t a_row, a_depth;  // floats from one row to the next, and along the depth; one of them is 1
  const float* b;
  int64_t b_depth, b_column;  // the same of B
  float* c;
  int64_t c_row;                // its columns lie side by side
  const float* bias = nullptr;  // (columns,)
  const float* gate = nullptr;  // as C
  int64_t gate_row = 0;
  bool relu = false;
  bool add = false;  // to what C holds, before bias, gate and relu
};

// The same bits for any number of threads.
void multiply(const Product& product, int threads);

// out[c] = Σ_r g[r][c], or out[c] += it; `g` (rows, columns) is contiguous. The same bits for any
// number of threads.
void sum_rows(const float* g, int64_t rows, int64_t columns, float* out, bool add, int threads);

// out (rows, width) = x (rows, depth) wᵀ + bias, all contiguous, for a small width.
void dots(const float* x, int64_t rows, int64_t depth, const float* w, const float* bias,
          int64_t width, float* out, int threads);

// into = g where y > 0, else zero; NaN counts as positive.
void gate(const float* g, const float* y, int64_t count, float* into);

}  // namespace recast::gemm
