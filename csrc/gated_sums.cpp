// Sums of experts weighted by gates: reads experts and gates in place, one sample at a time.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
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
#define RECAST_KERNEL "gated_sums_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::gated {
namespace {

// Multiplications below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;

class GatedSums {
 public:
  // Null when the kernels do not take these tensors. `chosen`: gate after gate, the vector that
  // each column weighs.
  static std::unique_ptr<GatedSums> make(const py::list& experts, const py::list& gates,
                                         const std::vector<int32_t>& chosen, bool softmax) {
    auto self = std::make_unique<GatedSums>();
    self->softmax_ = softmax;
    self->chosen_ = chosen;
    if (!self->experts_.read(experts)) return nullptr;
    if (!read_all(gates, self->experts_.batch(), self->gates_)) return nullptr;
    int64_t columns = 0;
    for (const TensorView& gate : self->gates_) {
      columns += gate.size[1];
      self->widest_ = std::max(self->widest_, gate.size[1]);
    }
    const auto outside = [&](int32_t k) { return k < 0 || k >= self->experts_.count(); };
    if (columns != static_cast<int64_t>(chosen.size()) ||
        std::any_of(chosen.begin(), chosen.end(), outside))
      throw py::value_error("gated_sums: the choice does not fit the gates");
    return self;
  }

  void forward(const py::list& results, int threads) const {
    const std::vector<TensorView> outs = sums(results);
    const py::gil_scoped_release release;
    each_sample(threads, [&](int64_t b, Scratch& scratch) {
      const int32_t* chosen = chosen_.data();
      for (size_t t = 0; t < gates_.size(); ++t) {
        weigh(gates_[t], b, scratch.weights.data());
        RECAST_CHOOSE(sum)
        (scratch.rows.data(), chosen, scratch.weights.data(), gates_[t].size[1], experts_.dim(),
         row(outs[t], b));
        chosen += gates_[t].size[1];
      }
    });
  }

  // `upstream` as the results of forward; `into`, `gates`: the gradients of experts and gates.
  void backward(const py::list& upstream, const py::list& into, const py::list& gates,
                int threads) const {
    const std::vector<TensorView> grads = sums(upstream);
    std::vector<TensorView> of_gates;
    FeatureRows of_experts;
    if (!of_experts.read(into) || !of_experts.fits(experts_) ||
        !read_all(gates, experts_.batch(), of_gates) || of_gates.size() != gates_.size())
      throw py::value_error("gated_sums: a gradient does not fit");
    const py::gil_scoped_release release;
    each_sample(threads, [&](int64_t b, Scratch& scratch) {
      of_experts.point(b, scratch.into.data());
      int64_t first = 0;
      for (size_t t = 0; t < gates_.size(); ++t) {
        const int64_t count = gates_[t].size[1];
        float* const weights = scratch.all.data() + first;
        weigh(gates_[t], b, weights);
        scratch.upstream[t] = row(grads[t], b);
        float* const gradient = row(of_gates[t], b);
        float along = 0.0f;
        for (int64_t k = 0; k < count; ++k) {
          gradient[k] = RECAST_CHOOSE(dot)(scratch.upstream[t], scratch.rows[chosen_[first + k]],
                                           experts_.dim());
          along += weights[k] * gradient[k];
        }
        if (softmax_)
          for (int64_t k = 0; k < count; ++k) gradient[k] = weights[k] * (gradient[k] - along);
        first += count;
      }
      for (int64_t e = 0; e < experts_.count(); ++e) {
        const auto& readers = readers_[static_cast<size_t>(e)];
        for (size_t r = 0; r < readers.size(); ++r) {
          scratch.gates[r] = readers[r].gate;
          scratch.weights[r] = scratch.all[readers[r].column];
        }
        RECAST_CHOOSE(sum)
        (scratch.upstream.data(), scratch.gates.data(), scratch.weights.data(),
         static_cast<int64_t>(readers.size()), experts_.dim(), scratch.into[e]);
      }
    });
  }

  void prepare() {
    readers_.assign(static_cast<size_t>(experts_.count()), {});
    int32_t column = 0;
    for (size_t t = 0; t < gates_.size(); ++t)
      for (int64_t k = 0; k < gates_[t].size[1]; ++k, ++column)
        readers_[chosen_[column]].push_back({static_cast<int32_t>(t), column});
    for (const auto& readers : readers_)
      widest_ = std::max(widest_, static_cast<int64_t>(readers.size()));
  }

 private:
  // Memory of one thread.
  struct Scratch {
    std::vector<const float*> rows, upstream;
    std::vector<float*> into;
    std::vector<float> weights, all;
    std::vector<int32_t> gates;
  };
  struct Reader {
    int32_t gate, column;
  };

  static bool read_all(const py::list& tensors, int64_t batch, std::vector<TensorView>& views) {
    for (const py::handle tensor : tensors) {
      TensorView view;
      if (!read_rows(tensor, batch, view)) return false;
      views.push_back(view);
    }
    return true;
  }

  static float* row(const TensorView& view, int64_t b) {
    return reinterpret_cast<float*>(view.data) + b * view.stride[0];
  }

  std::vector<TensorView> sums(const py::list& tensors) const {
    std::vector<TensorView> views;
    bool fits = read_all(tensors, experts_.batch(), views) && views.size() == gates_.size();
    for (const TensorView& view : views) fits = fits && view.size[1] == experts_.dim();
    if (!fits) throw py::value_error("gated_sums: a tensor does not fit");
    return views;
  }

  // The weights of sample b.
  void weigh(const TensorView& gate, int64_t b, float* weights) const {
    const float* const given = row(gate, b);
    const int64_t count = gate.size[1];
    std::copy(given, given + count, weights);
    if (!softmax_ || count == 0) return;
    const float most = *std::max_element(weights, weights + count);
    float total = 0.0f;
    for (int64_t k = 0; k < count; ++k) total += weights[k] = std::exp(weights[k] - most);
    for (int64_t k = 0; k < count; ++k) weights[k] /= total;
  }

  template <class Function>
  void each_sample(int threads, const Function& function) const {
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local Scratch scratch;
      const auto count = static_cast<size_t>(experts_.count());
      scratch.rows.resize(count);
      scratch.into.resize(count);
      scratch.upstream.resize(gates_.size());
      scratch.weights.resize(static_cast<size_t>(widest_));
      scratch.gates.resize(static_cast<size_t>(widest_));
      scratch.all.resize(chosen_.size());
      for (int64_t b = first; b < last; ++b) {
        experts_.point(b, scratch.rows.data());
        function(b, scratch);
      }
    };
    const int64_t batch = experts_.batch();
    const int64_t work = batch * static_cast<int64_t>(chosen_.size()) * experts_.dim();
    if (threads <= 1 || batch <= 1 || work < kWorthThreads) return run(0, batch);
    const int64_t pieces = std::min<int64_t>(batch, int64_t{threads} * 4);
    parallel_dynamic(threads, pieces,
                     [&](int64_t i, int) { run(batch * i / pieces, batch * (i + 1) / pieces); });
  }

  FeatureRows experts_;
  std::vector<TensorView> gates_;
  std::vector<int32_t> chosen_;
  std::vector<std::vector<Reader>> readers_;  // of each vector: the gates that weigh it
  int64_t widest_ = 0;
  bool softmax_ = false;
};

std::unique_ptr<GatedSums> make(const py::list& experts, const py::list& gates,
                                const std::vector<int32_t>& chosen, bool softmax) {
  auto made = GatedSums::make(experts, gates, chosen, softmax);
  if (made != nullptr) made->prepare();
  return made;
}

}  // namespace
}  // namespace recast::gated

void bind_gated_sums(py::module_& m) {
  using recast::gated::GatedSums;
  py::class_<GatedSums>(m, "GatedSums")
      .def("forward", &GatedSums::forward)
      .def("backward", &GatedSums::backward);
  m.def("gated_sums", &recast::gated::make);
}
