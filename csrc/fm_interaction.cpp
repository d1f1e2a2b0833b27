// Factorisation machine: reads the features where they are, one sample at a time.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "fm_interaction_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::fm {
namespace {

// Vector elements below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

class Interaction {
 public:
  // Null when the kernels do not take these features.
  static std::unique_ptr<Interaction> make(const py::list& features) {
    auto self = std::make_unique<Interaction>();
    return self->features_.read(features) ? std::move(self) : nullptr;
  }

  // `result`: (B, D), or (B, 1) for the sum over D.
  void forward(const py::handle& result, float scale, int threads) const {
    TensorView out;
    const bool reduce = reads(result, out);
    const py::gil_scoped_release release;
    each_sample(threads, [&](int64_t b, const float* const* rows, Scratch& scratch) {
      float* const row = reinterpret_cast<float*>(out.data) + b * out.stride[0];
      float* const columns = reduce ? scratch.columns.data() : row;
      RECAST_CHOOSE(forward)(rows, features_.count(), features_.dim(), 2.0f * scale, columns);
      if (!reduce) return;
      float sum = 0.0f;
      for (int64_t c = 0; c < features_.dim(); ++c) sum += columns[c];
      *row = sum;
    });
  }

  // `upstream` as the result of forward; `into`: the gradients of all features.
  void backward(const py::handle& upstream, float scale, const py::list& into, int threads) const {
    TensorView grad;
    const int64_t step = reads(upstream, grad) ? 0 : 1;
    FeatureRows gradients;
    if (!gradients.read(into) || !gradients.fits(features_))
      throw py::value_error("fm_interaction: a gradient does not fit");
    const py::gil_scoped_release release;
    each_sample(threads, [&](int64_t b, const float* const* rows, Scratch& scratch) {
      gradients.point(b, scratch.into.data());
      RECAST_CHOOSE(backward)
      (rows, features_.count(), features_.dim(), 2.0f * scale,
       reinterpret_cast<const float*>(grad.data) + b * grad.stride[0], step, scratch.into.data());
    });
  }

 private:
  // Memory of one thread.
  struct Scratch {
    std::vector<const float*> rows;
    std::vector<float*> into;
    std::vector<float> columns;
  };

  // Whether `tensor` holds sums over D.
  bool reads(const py::handle& tensor, TensorView& view) const {
    const bool fits = read_rows(tensor, features_.batch(), view) &&
                      (view.size[1] == 1 || view.size[1] == features_.dim());
    if (!fits) throw py::value_error("fm_interaction: a tensor does not fit");
    return view.size[1] == 1;
  }

  template <class Function>
  void each_sample(int threads, const Function& function) const {
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local Scratch scratch;
      const auto count = static_cast<size_t>(features_.count());
      scratch.rows.resize(count);
      scratch.into.resize(count);
      scratch.columns.resize(static_cast<size_t>(features_.dim()));
      for (int64_t b = first; b < last; ++b) {
        features_.point(b, scratch.rows.data());
        function(b, scratch.rows.data(), scratch);
      }
    };
    const int64_t batch = features_.batch();
    const int64_t work = batch * features_.count() * features_.dim();
    if (threads <= 1 || batch <= 1 || work < kWorthThreads) return run(0, batch);
    const int64_t pieces = std::min<int64_t>(batch, int64_t{threads} * 4);
    parallel_dynamic(threads, pieces,
                     [&](int64_t i, int) { run(batch * i / pieces, batch * (i + 1) / pieces); });
  }

  FeatureRows features_;
};

}  // namespace
}  // namespace recast::fm

void bind_fm_interaction(py::module_& m) {
  using recast::fm::Interaction;
  py::class_<Interaction>(m, "FmInteraction")
      .def("forward", &Interaction::forward)
      .def("backward", &Interaction::backward);
  m.def("fm_interaction", &Interaction::make);
}
