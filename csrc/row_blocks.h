// What kernels over the rows of matrices share: reading them, blocks of rows on several threads,
// and sums over these blocks.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "feature_rows.h"
#include "parallel.h"

namespace recast {

// A matrix of float32 with contiguous rows.
inline TensorView matrix_of(const char* op, const pybind11::handle& tensor) {
  TensorView view;
  if (!TensorReader::get().read(tensor.ptr(), view) || view.dtype != Dtype::float32 ||
      view.dims != 2 || !unit_stride(view))
    throw pybind11::value_error(std::string(op) + ": a tensor does not fit");
  return view;
}

inline TensorView matrix_of(const char* op, const pybind11::handle& tensor, int64_t rows,
                            int64_t columns) {
  const TensorView view = matrix_of(op, tensor);
  if (view.size[0] != rows || view.size[1] != columns)
    throw pybind11::value_error(std::string(op) + ": a tensor does not fit");
  return view;
}

inline float* row_of(const TensorView& view, int64_t row) {
  return reinterpret_cast<float*>(view.data) + row * view.stride[0];
}

constexpr int64_t kBlockRows = 256;  // rows whose gradients are summed in float, then in double
constexpr int64_t kBlockWorthThreads = 1 << 16;  // elements from which a second thread pays

inline int64_t row_blocks(int64_t rows) { return (rows + kBlockRows - 1) / kBlockRows; }

// function(block, its first row, the row behind its last).
template <class Function>
void each_row_block(int64_t rows, int64_t columns, int threads, const Function& function) {
  const int64_t blocks = row_blocks(rows);
  if (blocks <= 1 || rows * columns < kBlockWorthThreads) threads = 1;
  parallel_dynamic(threads, blocks, [&](int64_t i, int) {
    function(i, i * kBlockRows, std::min(rows, (i + 1) * kBlockRows));
  });
}

// The sums over (blocks, columns), in double.
inline void sum_blocks(const std::vector<float>& found, int64_t columns, float* sums) {
  for (int64_t c = 0; c < columns; ++c) {
    double sum = 0.0;
    for (size_t i = static_cast<size_t>(c); i < found.size(); i += static_cast<size_t>(columns))
      sum += found[i];
    sums[c] = static_cast<float>(sum);
  }
}

}  // namespace recast
