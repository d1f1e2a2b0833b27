// Batch norm with the statistics of the batch, of rows (N, C), or (N, C L) where each channel has L
// neighbouring columns. Blocks of rows are summed in float and their sums added in double, in
// order, so the result does not depend on the number of threads.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

#define RECAST_KERNEL "batch_norm_kernel.h"
#include "each_isa.h"

namespace recast::batch_norm {
namespace {

constexpr int64_t kRows = 64;               // in a block: its sums lose little in float
constexpr int64_t kWorthThreads = 1 << 17;  // elements from which a second thread pays

struct Rows {
  float* data;
  int64_t rows, columns, stride;
};

Rows rows_of(const py::handle& tensor) {
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 2 &&
                    view.dtype == Dtype::float32 && unit_stride(view);
  if (!read) throw py::value_error("batch_norm: rows do not fit");
  return {reinterpret_cast<float*>(view.data), view.size[0], view.size[1], view.stride[0]};
}

// Contiguous rows of the same shape as `like`.
Rows rows_of(const py::handle& tensor, const Rows& like) {
  const Rows rows = rows_of(tensor);
  if (rows.rows != like.rows || rows.columns != like.columns || rows.stride != rows.columns)
    throw py::value_error("batch_norm: rows do not fit");
  return rows;
}

// The numbers of so many channels; null for None.
float* channels_of(const py::handle& tensor, int64_t count) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 1 &&
                    view.dtype == Dtype::float32 && unit_stride(view) && view.size[0] == count;
  if (!read) throw py::value_error("batch_norm: channels do not fit");
  return reinterpret_cast<float*>(view.data);
}

// Columns of each channel.
int64_t places_of(const Rows& x, int64_t channels) {
  if (channels < 1 || x.columns % channels != 0)
    throw py::value_error("batch_norm: channels do not fit");
  return x.columns / channels;
}

// `numbers`, one per channel, for each column.
std::vector<float> spread(const float* numbers, int64_t channels, int64_t places) {
  std::vector<float> found(static_cast<size_t>(channels * places));
  for (int64_t c = 0; c < channels; ++c)
    std::fill_n(found.begin() + c * places, places, numbers[c]);
  return found;
}

template <class Function>
void each_block(const Rows& x, int threads, const Function& function) {
  const int64_t blocks = (x.rows + kRows - 1) / kRows;
  if (blocks <= 1 || x.rows * x.columns < kWorthThreads) threads = 1;
  parallel_static(threads, blocks, [&](int64_t i, int) {
    function(i, i * kRows, std::min(kRows, x.rows - i * kRows));
  });
}

// `count` sums per channel: function(first row, rows, sums) adds one block's part to `sums`, of
// which each column has its own.
template <class Function>
std::vector<double> summed(const Rows& x, int64_t places, int64_t count, int threads,
                           const Function& function) {
  const int64_t blocks = (x.rows + kRows - 1) / kRows, width = count * x.columns;
  std::vector<float> parts(static_cast<size_t>(blocks * width), 0.0f);
  each_block(x, threads, [&](int64_t block, int64_t first, int64_t rows) {
    function(first, rows, parts.data() + block * width);
  });
  std::vector<double> whole(static_cast<size_t>(width), 0.0);
  for (int64_t i = 0; i < blocks; ++i)
    for (int64_t c = 0; c < width; ++c)
      whole[static_cast<size_t>(c)] += parts[static_cast<size_t>(i * width + c)];
  if (places == 1) return whole;
  std::vector<double> found(static_cast<size_t>(width / places), 0.0);
  for (size_t c = 0; c < found.size(); ++c)
    for (int64_t k = 0; k < places; ++k) found[c] += whole[c * static_cast<size_t>(places) + k];
  return found;
}

// What backward needs of the batch: its mean and the inverse of its standard deviation, a row each.
struct Saved {
  float *mean, *inverse;
  int64_t channels;
};

Saved saved_of(const py::handle& tensor) {
  const Rows rows = rows_of(tensor);
  if (rows.rows != 2 || rows.stride != rows.columns)
    throw py::value_error("batch_norm: channels do not fit");
  return {rows.data, rows.data + rows.columns, rows.columns};
}

// Moves what is kept of earlier batches, unless that is null, towards `now`.
void follow(float* kept, size_t channel, float now, float momentum) {
  if (kept != nullptr) kept[channel] = kept[channel] * (1 - momentum) + now * momentum;
}

// Also writes what backward needs, and updates the running mean and variance, which may be None.
void forward(const py::handle& input, const py::handle& weight, const py::handle& bias,
             const py::handle& running_mean, const py::handle& running_var, double momentum,
             double eps, const py::handle& output, const py::handle& saved_out, int threads) {
  const Rows x = rows_of(input), out = rows_of(output, x);
  const auto [mean, inverse, channels] = saved_of(saved_out);
  const int64_t places = places_of(x, channels);
  const float *w = channels_of(weight, channels), *b = channels_of(bias, channels);
  float* const kept_mean = channels_of(running_mean, channels);
  float* const kept_var = channels_of(running_var, channels);
  const auto step = static_cast<float>(momentum);
  const py::gil_scoped_release release;
  const size_t count = static_cast<size_t>(channels);
  const double numbers = static_cast<double>(x.rows * places);
  const std::vector<double> sums =
      summed(x, places, 1, threads, [&](int64_t first, int64_t n, float* into) {
        RECAST_CHOOSE(sums)(x.data + first * x.stride, x.stride, n, x.columns, into);
      });
  for (size_t c = 0; c < count; ++c) mean[c] = static_cast<float>(sums[c] / numbers);
  const std::vector<float> means = spread(mean, channels, places);
  const std::vector<double> squares =
      summed(x, places, 1, threads, [&](int64_t first, int64_t n, float* into) {
        RECAST_CHOOSE(squares)
        (x.data + first * x.stride, x.stride, means.data(), n, x.columns, into);
      });
  std::vector<float> scale(count), shift(count, 0.0f);
  for (size_t c = 0; c < count; ++c) {
    follow(kept_mean, c, mean[c], step);
    follow(kept_var, c, static_cast<float>(squares[c] / (numbers - 1)), step);
    inverse[c] = static_cast<float>(1 / std::sqrt(squares[c] / numbers + eps));
    scale[c] = w == nullptr ? inverse[c] : w[c] * inverse[c];
    if (b != nullptr) shift[c] = b[c];
  }
  const std::vector<float> scales = spread(scale.data(), channels, places),
                           shifts = spread(shift.data(), channels, places);
  each_block(x, threads, [&](int64_t, int64_t first, int64_t n) {
    RECAST_CHOOSE(apply)
    (x.data + first * x.stride, x.stride, means.data(), scales.data(), shifts.data(), n, x.columns,
     out.data + first * x.columns);
  });
}

// With `of_input` None, only the gradients of weight and bias are written.
void backward(const py::handle& grad, const py::handle& input, const py::handle& weight,
              const py::handle& saved_in, const py::handle& of_input, const py::handle& of_weight,
              const py::handle& of_bias, int threads) {
  const Rows x = rows_of(input), g = rows_of(grad, x);
  const Rows into = of_input.is_none() ? Rows{nullptr, 0, 0, 0} : rows_of(of_input, x);
  const auto [mean, inverse, channels] = saved_of(saved_in);
  const int64_t places = places_of(x, channels);
  const float* w = channels_of(weight, channels);
  float *const dw = channels_of(of_weight, channels), *const db = channels_of(of_bias, channels);
  const py::gil_scoped_release release;
  const size_t count = static_cast<size_t>(channels);
  const double numbers = static_cast<double>(x.rows * places);
  const std::vector<float> means = spread(mean, channels, places);
  const std::vector<double> sums =
      summed(x, places, 2, threads, [&](int64_t first, int64_t n, float* part) {
        RECAST_CHOOSE(backward_sums)
        (g.data + first * x.columns, x.data + first * x.stride, x.stride, means.data(), n,
         x.columns, part, part + x.columns);
      });
  std::vector<float> scale(count), shift(count), slope(count);
  for (size_t c = 0; c < count; ++c) {
    const double of = sums[c], along = sums[count + c] * inverse[c];
    db[c] = static_cast<float>(of);
    dw[c] = static_cast<float>(along);
    scale[c] = w == nullptr ? inverse[c] : w[c] * inverse[c];
    shift[c] = static_cast<float>(of / numbers);
    slope[c] = static_cast<float>(along * inverse[c] / numbers);
  }
  if (into.data == nullptr) return;
  const std::vector<float> scales = spread(scale.data(), channels, places),
                           shifts = spread(shift.data(), channels, places),
                           slopes = spread(slope.data(), channels, places);
  each_block(x, threads, [&](int64_t, int64_t first, int64_t n) {
    RECAST_CHOOSE(backward_apply)
    (g.data + first * x.columns, x.data + first * x.stride, x.stride, means.data(), scales.data(),
     shifts.data(), slopes.data(), n, x.columns, into.data + first * x.columns);
  });
}

}  // namespace
}  // namespace recast::batch_norm

void bind_batch_norm(py::module_& m) {
  m.def("batch_norm_forward", &recast::batch_norm::forward);
  m.def("batch_norm_backward", &recast::batch_norm::backward);
}
