// Cross networks. With vector weights, the whole network is one pass over the rows, whatever the
// number of layers: each layer's result is a multiple of x0, plus x, plus a vector that all samples
// share. With matrix weights, the products are left to BLAS, and the rest of a layer is one pass.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

namespace recast::cross {

// One row of a layer's tail, x0 * (m + inner) * gate + outer + x; the biases inner and outer and
// the gate may be null.
struct TailRow {
  const float *x0, *m, *x, *inner, *gate, *outer, *grad;
};

// Where its gradients go: those of m and gate are written, that of x0 is added unless `fresh`, sums
// are added. With `residual` the gradient of x is added to that of x0.
struct TailGrad {
  float *m, *x0, *gate, *inner_sum, *outer_sum, *gate_sum;
  bool fresh, residual;
};

}  // namespace recast::cross

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "cross_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::cross {
namespace {

// Sums over samples are taken in kParts parts, which are then added in order: the result does not
// depend on the number of threads. Within a part, every kRows rows are summed on their own first.
constexpr int64_t kParts = 16;
constexpr int64_t kRows = 64;
constexpr int64_t kWorthThreads = 1
                                  << 15;  // elements below which a thread costs more than it saves

float* floats(const TensorView& view) { return reinterpret_cast<float*>(view.data); }

// The data of a contiguous float32 tensor; null for None. Throws when it does not have `count`
// elements.
float* flat(const py::handle& tensor, int64_t count) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  if (!TensorReader::get().read(tensor.ptr(), view) || view.dtype != Dtype::float32 ||
      view.numel() != count)
    throw py::value_error("cross: a vector does not fit");
  return floats(view);
}

// Calls function(part) for each part, on several threads if that pays.
template <class Function>
void each_part(int threads, int64_t elements, const Function& function) {
  if (elements < kWorthThreads) threads = 1;
  parallel_dynamic(threads, kParts, [&](int64_t part, int) { function(part); });
}

// (parts, count) partial sums.
class Sums {
 public:
  explicit Sums(int64_t count) : count_(count), data_(static_cast<size_t>(count * kParts)) {}

  // Adds `block` to a part, and zeroes it.
  void take(int64_t part, std::vector<float>& block) {
    RECAST_CHOOSE(add)(block.data(), count_, data_.data() + part * count_);
    std::fill(block.begin(), block.end(), 0.0f);
  }

  // The whole sum of `size` numbers from `first` on; `to` may be null.
  void give(int64_t first, int64_t size, float* to) const {
    if (to == nullptr) return;
    std::fill(to, to + size, 0.0f);
    for (int64_t part = 0; part < kParts; ++part)
      RECAST_CHOOSE(add)(data_.data() + part * count_ + first, size, to);
  }

 private:
  int64_t count_;
  std::vector<float> data_;
};

// ---------------------------------------------------------------- networks of vectors

class VectorNetwork {
 public:
  // x0, x: (B, d) with contiguous rows, x None when it is x0; weights: L contiguous vectors of d;
  // offsets: (L,), what the biases of the layers before l add to the product of layer l. Null when
  // the kernels do not take them.
  static std::unique_ptr<VectorNetwork> make(const py::handle& x0, const py::handle& x,
                                             const py::list& weights, const py::handle& offsets) {
    auto self = std::make_unique<VectorNetwork>();
    const TensorReader& reader = TensorReader::get();
    if (!reader.read(x0.ptr(), self->x0_) || self->x0_.dims != 2) return nullptr;
    const int64_t batch = self->x0_.size[0], dim = self->x0_.size[1];
    self->same_ = x.is_none();
    if (!read_rows(x0, batch, self->x0_)) return nullptr;
    if (!read_rows(self->same_ ? x0 : x, batch, self->x_)) return nullptr;
    if (self->x_.size[1] != dim) return nullptr;
    for (const auto& weight : weights) {
      TensorView view;
      if (!reader.read(weight.ptr(), view) || view.dtype != Dtype::float32 || view.numel() != dim)
        return nullptr;
      self->weights_.push_back(floats(view));
    }
    self->offsets_ = flat(offsets, self->layers());
    return self;
  }

  // result: (B, d); beta: (d,) or None, the sum of all biases.
  void forward(const py::handle& result, const py::handle& beta, int threads) const {
    TensorView out;
    fits(result, out);
    const float* const bias = flat(beta, x0_.size[1]);
    const py::gil_scoped_release release;
    each_sample(threads, [&](int64_t b, Scratch& s, int64_t) {
      multiples(b, s);
      RECAST_CHOOSE(combine)
      (row(x0_, b), row(x_, b), bias, s.alpha.back(), x0_.size[1], row(out, b));
    });
  }

  // upstream, into_x0, into_x: (B, d), into_x None when x is x0; into_weights: (L, d), without the
  // part that flows through the offsets; into_bias: (d,), the sum of upstream; into_offsets: (L,).
  void backward(const py::handle& upstream, const py::handle& into_x0, const py::handle& into_x,
                const py::handle& into_weights, const py::handle& into_bias,
                const py::handle& into_offsets, int threads) const {
    const int64_t dim = x0_.size[1], count = layers();
    TensorView grad, dx0, dx;
    fits(upstream, grad);
    fits(into_x0, dx0);
    if (!same_) fits(into_x, dx);
    float* const of_weights = flat(into_weights, count * dim);
    float* const of_bias = flat(into_bias, dim);
    float* const of_offsets = flat(into_offsets, count);
    const py::gil_scoped_release release;
    Sums sums(count * dim + dim + count);
    each_sample(threads, [&](int64_t b, Scratch& s, int64_t part) {
      if (s.block.empty()) s.block.resize(static_cast<size_t>(count * dim + dim + count));
      float* const block = s.block.data();
      const float *const g = row(grad, b), *const v0 = row(x0_, b), *const v = row(x_, b);
      multiples(b, s);
      gradients(g, v0, s);
      float* const of_x0 = row(dx0, b);
      const float* const* w = weights_.data();
      if (same_) {
        for (int64_t l = 0; l < count; ++l) s.of_dot[l] += s.of_start[l];
        RECAST_CHOOSE(spread)
        (g, s.alpha.back() + 1.0f, v0, w, s.of_dot.data(), count, dim, of_x0, block);
      } else {
        RECAST_CHOOSE(spread)
        (g, s.alpha.back(), v0, w, s.of_dot.data(), count, dim, of_x0, block);
        RECAST_CHOOSE(spread)
        (g, 1.0f, v, w, s.of_start.data(), count, dim, row(dx, b), block);
      }
      RECAST_CHOOSE(add)(g, dim, block + count * dim);
      RECAST_CHOOSE(add)(s.of_offset.data(), count, block + (count + 1) * dim);
      if (++s.rows % kRows == 0 || s.last) sums.take(part, s.block);
    });
    sums.give(0, count * dim, of_weights);
    sums.give(count * dim, dim, of_bias);
    sums.give((count + 1) * dim, count, of_offsets);
  }

 private:
  // Scratch memory of one part. After l layers the value is alpha[l] x0 + x + a shared vector.
  struct Scratch {
    std::vector<float> dot, start, alpha, of_dot, of_start, of_offset, block;
    int64_t rows = 0;
    bool last = false;
  };

  int64_t layers() const { return static_cast<int64_t>(weights_.size()); }

  static float* row(const TensorView& view, int64_t b) { return floats(view) + b * view.stride[0]; }

  void fits(const py::handle& tensor, TensorView& view) const {
    if (!read_rows(tensor, x0_.size[0], view) || view.size[1] != x0_.size[1])
      throw py::value_error("cross: a tensor does not fit");
  }

  // The dot products with all weights, and alpha from them.
  void multiples(int64_t b, Scratch& s) const {
    RECAST_CHOOSE(dots)(row(x0_, b), weights_.data(), layers(), x0_.size[1], s.dot.data());
    if (!same_)
      RECAST_CHOOSE(dots)(row(x_, b), weights_.data(), layers(), x0_.size[1], s.start.data());
    const float* const start = same_ ? s.dot.data() : s.start.data();
    s.alpha[0] = 0.0f;
    for (int64_t l = 0; l < layers(); ++l)
      s.alpha[l + 1] = s.alpha[l] + (s.alpha[l] * s.dot[l] + start[l] + offsets_[l]);
  }

  // The gradients of a sample's products, from the last layer to the first.
  void gradients(const float* grad, const float* x0, Scratch& s) const {
    float of_alpha;
    RECAST_CHOOSE(dots)(grad, &x0, 1, x0_.size[1], &of_alpha);
    for (int64_t l = layers() - 1; l >= 0; --l) {
      s.of_start[l] = s.of_offset[l] = of_alpha;
      s.of_dot[l] = of_alpha * s.alpha[l];
      of_alpha += of_alpha * s.dot[l];
    }
  }

  // Calls function(sample, scratch, part), in order within each part.
  template <class Function>
  void each_sample(int threads, const Function& function) const {
    const int64_t batch = x0_.size[0];
    each_part(threads, batch * x0_.size[1], [&](int64_t part) {
      Scratch s;
      const auto count = static_cast<size_t>(layers());
      for (auto* v : {&s.dot, &s.start, &s.of_dot, &s.of_start, &s.of_offset}) v->resize(count);
      s.alpha.resize(count + 1);
      const int64_t last = batch * (part + 1) / kParts;
      for (int64_t b = batch * part / kParts; b < last; ++b) {
        s.last = b + 1 == last;
        function(b, s, part);
      }
    });
  }

  TensorView x0_, x_;
  std::vector<const float*> weights_;
  const float* offsets_ = nullptr;
  bool same_ = false;
};

// ---------------------------------------------------------------- layers of matrices

// The tensors of a layer's tail: x0, m, x (B, d) and gate (B, d) or None, with contiguous rows;
// inner, outer (d,) or None.
class Tail {
 public:
  // Null when the kernels do not take these.
  static std::unique_ptr<Tail> make(const py::handle& x0, const py::handle& m,
                                    const py::handle& inner, const py::handle& gate) {
    auto self = std::make_unique<Tail>();
    if (!TensorReader::get().read(x0.ptr(), self->x0_) || self->x0_.dims != 2) return nullptr;
    const int64_t batch = self->x0_.size[0];
    self->gated_ = !gate.is_none();
    if (!read_rows(x0, batch, self->x0_) || !self->reads(m, self->m_)) return nullptr;
    if (self->gated_ && !self->reads(gate, self->gate_)) return nullptr;
    self->inner_ = flat(inner, self->x0_.size[1]);
    self->read_ = py::make_tuple(x0, m, inner, gate);
    return self;
  }

  void forward(const py::handle& x, const py::handle& outer, const py::handle& result,
               int threads) const {
    TensorView start, out;
    if (!reads(x, start) || !reads(result, out)) throw py::value_error("cross: a tensor misfits");
    const float* const bias = flat(outer, x0_.size[1]);
    const py::gil_scoped_release release;
    each_part(threads, x0_.numel(), [&](int64_t part) {
      for (int64_t b = first(part); b < first(part + 1); ++b) {
        TailRow r = row(b);
        r.x = at(start, b);
        r.outer = bias;
        RECAST_CHOOSE(tail)(r, x0_.size[1], at(out, b));
      }
    });
  }

  // upstream, into_m, into_x0, into_gate (None without gate): (B, d); the sums: (d,) or None.
  void backward(const py::handle& upstream, const py::handle& into_m, const py::handle& into_x0,
                const py::handle& into_gate, const py::handle& inner_sum,
                const py::handle& outer_sum, const py::handle& gate_sum, bool fresh, bool residual,
                int threads) const {
    const int64_t dim = x0_.size[1];
    TensorView grad, dm, dx0, dgate;
    if (!reads(upstream, grad) || !reads(into_m, dm) || !reads(into_x0, dx0) ||
        (gated_ && !reads(into_gate, dgate)))
      throw py::value_error("cross: a gradient does not fit");
    float* const wanted[] = {flat(inner_sum, dim), flat(outer_sum, dim), flat(gate_sum, dim)};
    const py::gil_scoped_release release;
    Sums sums(3 * dim);
    each_part(threads, x0_.numel(), [&](int64_t part) {
      std::vector<float> block(static_cast<size_t>(3 * dim));
      const auto of = [&](int k) { return wanted[k] ? block.data() + k * dim : nullptr; };
      for (int64_t b = first(part), rows = 0; b < first(part + 1); ++b) {
        TailRow r = row(b);
        r.grad = at(grad, b);
        RECAST_CHOOSE(tail_grad)
        (r,
         {at(dm, b), at(dx0, b), gated_ ? at(dgate, b) : nullptr, of(0), of(1),
          gated_ ? of(2) : nullptr, fresh, residual},
         dim);
        if (++rows % kRows == 0 || b + 1 == first(part + 1)) sums.take(part, block);
      }
    });
    for (int k = 0; k < 3; ++k) sums.give(k * dim, dim, wanted[k]);
  }

 private:
  static float* at(const TensorView& view, int64_t b) { return floats(view) + b * view.stride[0]; }

  bool reads(const py::handle& tensor, TensorView& view) const {
    return read_rows(tensor, x0_.size[0], view) && view.size[1] == x0_.size[1];
  }

  int64_t first(int64_t part) const { return x0_.size[0] * part / kParts; }

  TailRow row(int64_t b) const {
    return {at(x0_, b), at(m_, b), nullptr, inner_, gated_ ? at(gate_, b) : nullptr,
            nullptr,    nullptr};
  }

  TensorView x0_, m_, gate_;
  const float* inner_ = nullptr;
  bool gated_ = false;
  py::object read_;  // the tensors, some of which may be copies that nothing else keeps
};

}  // namespace
}  // namespace recast::cross

void bind_cross(py::module_& m) {
  using recast::cross::Tail;
  using recast::cross::VectorNetwork;
  py::class_<VectorNetwork>(m, "CrossVectorNetwork")
      .def("forward", &VectorNetwork::forward)
      .def("backward", &VectorNetwork::backward);
  py::class_<Tail>(m, "CrossTail").def("forward", &Tail::forward).def("backward", &Tail::backward);
  m.def("cross_vector", &VectorNetwork::make);
  m.def("cross_tail", &Tail::make);
}
