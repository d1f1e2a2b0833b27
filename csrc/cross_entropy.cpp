// Softmax cross entropy with one class a row: the logits are read once forward; backward they are
// read, and their gradient written.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "cross_entropy_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::cross_entropy {
namespace {

constexpr int64_t kTask = 1 << 16;  // logits from which another thread pays

struct Rows {
  float* data;
  int64_t count, classes, stride;
  float* row(int64_t r) const { return data + r * stride; }
};

Rows rows_of(const py::handle& tensor) {
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dims == 2 &&
                    view.dtype == Dtype::float32 && unit_stride(view);
  if (!read) throw py::value_error("cross_entropy: the logits do not fit");
  return {reinterpret_cast<float*>(view.data), view.size[0], view.size[1], view.stride[0]};
}

// `count` neighbouring numbers.
template <class Number>
Number* vector_of(const py::handle& tensor, int64_t count, Dtype dtype) {
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dtype == dtype &&
                    view.numel() == count && view.dims <= 2 &&
                    (view.dims == 0 || (unit_stride(view) && (view.dims == 1 || view.size[0] == 1 ||
                                                              view.stride[0] == view.size[1])));
  if (!read) throw py::value_error("cross_entropy: a vector does not fit");
  return reinterpret_cast<Number*>(view.data);
}

// What all rows share: the part of the loss that goes to all classes alike, and the target that
// marks a row without loss.
struct Setting {
  float smoothing;
  int64_t ignored;
};

// The loss of a row; its largest logit and the logarithm of Σ exp(x - that) to `top`, `log_sum`.
float loss(const float* x, int64_t classes, int64_t target, const Setting& setting, float* top,
           float* log_sum) {
  float sum;
  RECAST_CHOOSE(normalise)(x, classes, top, &sum);
  *log_sum = std::log(sum);
  if (target == setting.ignored) return 0.0f;
  const float own = (*top - x[target]) + *log_sum;
  if (setting.smoothing == 0.0f) return own;
  const double mean = RECAST_CHOOSE(sum_of)(x, classes) / static_cast<double>(classes);
  const double even = (*top - mean) + *log_sum;
  return static_cast<float>((1.0 - setting.smoothing) * own + setting.smoothing * even);
}

// The gradient of a row, `up` times that of its loss.
void gradient(const float* x, int64_t classes, int64_t target, const Setting& setting, float top,
              float log_sum, float up, float* into) {
  const bool ignored = target == setting.ignored;
  if (ignored) up = 0.0f;
  if (up == 0.0f && std::isfinite(top) && std::isfinite(log_sum)) {
    std::fill_n(into, classes, 0.0f);
    return;
  }
  const float even = setting.smoothing / static_cast<float>(classes);
  RECAST_CHOOSE(gradient)
  (x, classes, top, log_sum, ignored ? 0 : target, 1.0f - setting.smoothing, even, up, into);
}

template <class Function>
void each_row(const Rows& logits, int threads, const Function& function) {
  const int64_t together = std::max<int64_t>(1, kTask / std::max<int64_t>(1, logits.classes));
  const int64_t tasks = (logits.count + together - 1) / together;
  parallel_dynamic(tasks <= 1 ? 1 : threads, tasks, [&](int64_t i, int) {
    const int64_t last = std::min(logits.count, (i + 1) * together);
    for (int64_t r = i * together; r < last; ++r) function(r);
  });
}

// The first row whose target is no class and not ignored; -1 when there is none.
int64_t astray(const Rows& logits, const int64_t* target, int64_t ignored) {
  for (int64_t r = 0; r < logits.count; ++r) {
    const bool within = target[r] >= 0 && target[r] < logits.classes;
    if (!within && target[r] != ignored) return r;
  }
  return -1;
}

// What a caller needs besides what is written: what `astray` found and, where that is -1, the
// number of rows with a loss, and the sum of these.
struct Found {
  int64_t wrong, counted;
  double total;
  py::tuple tuple() const { return py::make_tuple(wrong, counted, total); }
};

Found summed(const Rows& logits, const int64_t* target, const float* losses, int64_t ignored) {
  Found found{-1, 0, 0.0};
  for (int64_t r = 0; r < logits.count; ++r) {
    found.total += losses[r];
    found.counted += target[r] != ignored;
  }
  return found;
}

// Writes a loss for each row, and (2, rows) what the backward needs; nothing for a wrong target.
py::tuple forward(const py::handle& logits, const py::handle& target, const py::handle& losses,
                  const py::handle& stats, float smoothing, int64_t ignored, int threads) {
  const Rows xs = rows_of(logits);
  const auto* ids = vector_of<const int64_t>(target, xs.count, Dtype::int64);
  auto* const out = vector_of<float>(losses, xs.count, Dtype::float32);
  auto* const kept = vector_of<float>(stats, 2 * xs.count, Dtype::float32);
  const Setting setting{smoothing, ignored};
  Found found{-1, 0, 0.0};
  {
    const py::gil_scoped_release release;
    found.wrong = astray(xs, ids, ignored);
    if (found.wrong < 0) {
      each_row(xs, threads, [&](int64_t r) {
        out[r] = loss(xs.row(r), xs.classes, ids[r], setting, kept + r, kept + xs.count + r);
      });
      found = summed(xs, ids, out, ignored);
    }
  }
  return found.tuple();
}

// `grad`: one number, or one for each row; multiplied by `scale`.
void backward(const py::handle& logits, const py::handle& target, const py::handle& stats,
              const py::handle& grad, float scale, const py::handle& into, float smoothing,
              int64_t ignored, int threads) {
  const Rows xs = rows_of(logits), to = rows_of(into);
  if (to.count != xs.count || to.classes != xs.classes)
    throw py::value_error("cross_entropy: the gradient does not fit");
  const auto* ids = vector_of<const int64_t>(target, xs.count, Dtype::int64);
  const auto* kept = vector_of<const float>(stats, 2 * xs.count, Dtype::float32);
  TensorView ups;
  const bool one = TensorReader::get().read(grad.ptr(), ups) && ups.numel() == 1;
  const auto* up = vector_of<const float>(grad, one ? 1 : xs.count, Dtype::float32);
  const Setting setting{smoothing, ignored};
  if (astray(xs, ids, ignored) >= 0)  // written to since, as by numpy
    throw py::value_error("cross_entropy: the targets have changed since forward");
  const py::gil_scoped_release release;
  each_row(xs, threads, [&](int64_t r) {
    gradient(xs.row(r), xs.classes, ids[r], setting, kept[r], kept[xs.count + r],
             up[one ? 0 : r] * scale, to.row(r));
  });
}

// Both at once, each row while it is in the cache; the gradient takes the place of the logits.
py::tuple both(const py::handle& logits, const py::handle& target, const py::handle& losses,
               const py::handle& grad, float scale, float smoothing, int64_t ignored, int threads) {
  const Rows xs = rows_of(logits);
  const auto* ids = vector_of<const int64_t>(target, xs.count, Dtype::int64);
  auto* const out = vector_of<float>(losses, xs.count, Dtype::float32);
  TensorView ups;
  const bool one = TensorReader::get().read(grad.ptr(), ups) && ups.numel() == 1;
  const auto* up = vector_of<const float>(grad, one ? 1 : xs.count, Dtype::float32);
  const Setting setting{smoothing, ignored};
  Found found{-1, 0, 0.0};
  {
    const py::gil_scoped_release release;
    found.wrong = astray(xs, ids, ignored);
    if (found.wrong < 0) {
      each_row(xs, threads, [&](int64_t r) {
        float top, log_sum;
        auto* const row = xs.row(r);
        out[r] = loss(row, xs.classes, ids[r], setting, &top, &log_sum);
        gradient(row, xs.classes, ids[r], setting, top, log_sum, up[one ? 0 : r] * scale, row);
      });
      found = summed(xs, ids, out, ignored);
    }
  }
  return found.tuple();
}

}  // namespace
}  // namespace recast::cross_entropy

void bind_cross_entropy(py::module_& m) {
  m.def("cross_entropy_forward", &recast::cross_entropy::forward);
  m.def("cross_entropy_backward", &recast::cross_entropy::backward);
  m.def("cross_entropy_both", &recast::cross_entropy::both);
}
