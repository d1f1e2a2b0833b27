// Products of pairs of feature vectors: reads the vectors in place, one sample at a time.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "pair_list.h"

namespace py = pybind11;

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "pair_products_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::pairs {
namespace {

// What is summed: nothing (B, P, D), the vectors (B, P), the pairs (B, D), or both (B, 1).
enum class Sum { none = 0, dim = 1, pairs = 2, all = 3 };

class Products {
 public:
  // Null when the kernels do not take these arguments. `right` empty: the same vectors.
  static std::unique_ptr<Products> make(const py::list& left, const py::list& right,
                                        const py::handle& li, const py::handle& lj,
                                        const py::object& weight) {
    auto self = std::make_unique<Products>();
    if (!self->vectors_.read(left, right, li, lj)) return nullptr;
    self->weighted_ = !weight.is_none();
    if (self->weighted_ && (!read_rows(weight, self->vectors_.batch(), self->weight_) ||
                            self->weight_.size[1] != self->vectors_.count()))
      return nullptr;
    return self;
  }

  void forward(const py::handle& result, int sum, int threads) const {
    TensorView out;
    const Sum what = fits(result, sum, out);
    const py::gil_scoped_release release;
    vectors_.each_sample(threads, [&](int64_t b, const Sample& s) {
      float* const row = reinterpret_cast<float*>(out.data) + b * out.stride[0];
      const float* const w = weight_of(b);
      if (what == Sum::none) return RECAST_CHOOSE(products)(s.list, s.left, s.right, w, row);
      if (what == Sum::dim) return RECAST_CHOOSE(inner)(s.list, s.left, s.right, w, row);
      if (what == Sum::pairs) return RECAST_CHOOSE(pooled)(s.list, s.left, s.right, w, row);
      RECAST_CHOOSE(pooled)(s.list, s.left, s.right, w, s.columns);
      *row = 0.0f;
      for (int64_t c = 0; c < s.list.dim; ++c) *row += s.columns[c];
    });
  }

  // `upstream`: shaped like the result of forward; `left, right`: one (B, F, D) each, the gradients
  // of the vectors, `right` empty when they are the same; `weight`: (B, P), or None.
  void backward(const py::handle& upstream, int sum, const py::list& left, const py::list& right,
                const py::object& weight, int threads) const {
    TensorView grad, into_weight;
    const Sum what = fits(upstream, sum, grad);
    const bool weighted = !weight.is_none();
    if (weighted && (!read_rows(weight, vectors_.batch(), into_weight) ||
                     into_weight.size[1] != vectors_.count()))
      throw py::value_error("pair_products: the gradient of the weights does not fit");
    const Gradients into(vectors_, left, right);
    const int64_t step = what == Sum::none || what == Sum::dim ? grad.stride[1] : 0;
    const bool scalar = what == Sum::dim || what == Sum::all;
    const py::gil_scoped_release release;
    vectors_.each_sample(threads, [&](int64_t b, const Sample& s) {
      into.start(b, s);
      RECAST_CHOOSE(backward)
      (s.list, s.left, s.right, weight_of(b),
       reinterpret_cast<const float*>(grad.data) + b * grad.stride[0], step, scalar, s.into_left,
       s.into_right,
       weighted ? reinterpret_cast<float*>(into_weight.data) + b * into_weight.stride[0] : nullptr);
    });
  }

 private:
  Sum fits(const py::handle& tensor, int sum, TensorView& view) const {
    const auto what = static_cast<Sum>(sum);
    const int64_t batch = vectors_.batch(), pairs = vectors_.count(), dim = vectors_.dim();
    const bool known = sum >= 0 && sum <= 3;
    const int64_t width = what == Sum::dim ? pairs : what == Sum::all ? 1 : dim;
    bool good = known && TensorReader::get().read(tensor.ptr(), view) &&
                view.dtype == Dtype::float32 && unit_stride(view) && view.size[0] == batch;
    good = good && view.size[view.dims - 1] == width;
    good = good && (what == Sum::none ? view.dims == 3 && view.size[1] == pairs : view.dims == 2);
    if (!good) throw py::value_error("pair_products: a tensor does not fit");
    return what;
  }

  const float* weight_of(int64_t b) const {
    if (!weighted_) return nullptr;
    return reinterpret_cast<const float*>(weight_.data) + b * weight_.stride[0];
  }

  Vectors vectors_;
  TensorView weight_;
  bool weighted_ = false;
};

}  // namespace
}  // namespace recast::pairs

void bind_pair_products(py::module_& m) {
  using recast::pairs::Products;
  py::class_<Products>(m, "PairProducts")
      .def("forward", &Products::forward)
      .def("backward", &Products::backward);
  m.def("pair_products", &Products::make);
}
