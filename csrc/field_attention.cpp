// Attention between the fields of a sample: many samples, few fields, short vectors.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "attention_heads.h"
#include "isa.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::attention {

using heads::Rows;

struct Head {
  int64_t queries, keys, dim, values;  // rows of q, of k and v; elements of a row of q and k, of v
  int64_t padded_keys, padded_dim, padded_values;  // rounded up to whole registers
  int64_t row, wide;  // all keys, and rounded up: `keys` may be some of them
  int64_t block;      // queries whose weights stay in L1
  float scale;
  Rows q, k, v, out;  // out: its gradient in backward
  Rows dq, dk, dv;
  Rows bias, filled;  // (queries, keys), or null; where `filled` is not 0, a score is `fill`
  Rows dbias;         // or null
  float fill;
  bool safe;           // rows of -inf have weights of 0
  const float* noise;  // (queries, keys), or null
  float* weights;      // written in forward, their gradient read in backward; or null
};

// Memory of one thread.
struct Room {
  float *kt, *vt, *q, *k, *v, *grad, *a, *da, *dropped, *parts;
};

}  // namespace recast::attention

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "field_attention_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::attention {
namespace {

using heads::like, heads::padded, heads::reads, heads::rows;

class Attention {
 public:
  // Null when the kernels do not take these tensors.
  // `bias, filled`: (N, H, queries, keys) with contiguous rows, or None.
  static std::unique_ptr<Attention> make(const py::handle& q, const py::handle& k,
                                         const py::handle& v, const py::object& bias,
                                         const py::object& filled, float fill, bool safe) {
    auto self = std::make_unique<Attention>();
    if (!reads(q, self->q_) || !reads(k, self->k_) || !reads(v, self->v_)) return nullptr;
    if (!like(self->q_, self->k_, 2) || !like(self->q_, self->v_, 2)) return nullptr;
    if (self->q_.size[3] != self->k_.size[3] || self->k_.size[2] != self->v_.size[2] ||
        self->k_.size[2] == 0)
      return nullptr;
    if (!self->plane_of(bias, self->bias_) || !self->plane_of(filled, self->filled_))
      return nullptr;
    self->fill_ = fill, self->safe_ = safe;
    self->kept_ = {bias, filled};
    return self;
  }

  // `out`: (N, H, queries, values); `noise, weights`: contiguous (N, H, queries, keys) or None.
  void forward(const py::handle& out, float scale, const py::object& noise,
               const py::object& weights, int threads) const {
    TensorView o, n, w;
    if (!reads(out, o) || !square(noise, n) || !square(weights, w) || !fits_out(o))
      throw py::value_error("field_attention: a tensor does not fit");
    const py::gil_scoped_release release;
    each_head(threads, scale, [&](int64_t b, int64_t at, Head& head, const Room& room) {
      head.out = rows(o, b, at);
      head.noise = plane(n, b, at);
      head.weights = plane(w, b, at);
      RECAST_CHOOSE(forward)(head, room);
    });
  }

  // `upstream`: shaped like out; `weights`: their gradient, or None; dq, dk, dv: like q, k, v.
  void backward(const py::handle& upstream, float scale, const py::object& noise,
                const py::object& weights, const py::handle& dq, const py::handle& dk,
                const py::handle& dv, int threads, const py::handle& dbias) const {
    TensorView o, n, w, into_q, into_k, into_v, into_bias;
    const bool good = reads(upstream, o) && square(noise, n) && square(weights, w) && fits_out(o) &&
                      reads(dq, into_q) && reads(dk, into_k) && reads(dv, into_v) &&
                      like(into_q, q_, 4) && like(into_k, k_, 4) && like(into_v, v_, 4) &&
                      plane_of(dbias, into_bias);
    if (!good) throw py::value_error("field_attention: a gradient does not fit");
    const py::gil_scoped_release release;
    each_head(threads, scale, [&](int64_t b, int64_t at, Head& head, const Room& room) {
      head.out = rows(o, b, at);
      head.noise = plane(n, b, at);
      head.weights = plane(w, b, at);
      head.dq = rows(into_q, b, at), head.dk = rows(into_k, b, at);
      head.dv = rows(into_v, b, at), head.dbias = rows(into_bias, b, at);
      RECAST_CHOOSE(backward)(head, room);
    });
  }

 private:
  bool fits_out(const TensorView& out) const {
    return like(out, q_, 3) && out.size[3] == v_.size[3];
  }

  // A contiguous (N, H, queries, keys), or None.
  bool square(const py::object& tensor, TensorView& view) const {
    view.data = nullptr;
    if (tensor.is_none()) return true;
    if (!reads(tensor, view) || !like(view, q_, 3) || view.size[3] != k_.size[2]) return false;
    const int64_t plane = view.size[2] * view.size[3];
    return view.numel() == 0 || ((view.stride[2] == view.size[3] || view.size[2] == 1) &&
                                 (view.stride[1] == plane || view.size[1] == 1) &&
                                 (view.stride[0] == plane * view.size[1] || view.size[0] == 1));
  }

  // A (N, H, queries, keys) with contiguous rows, which may be broadcast, or None.
  bool plane_of(const py::handle& tensor, TensorView& view) const {
    view.data = nullptr;
    if (tensor.is_none()) return true;
    return reads(tensor, view) && like(view, q_, 3) && view.size[3] == k_.size[2];
  }

  static float* plane(const TensorView& view, int64_t n, int64_t head) {
    if (view.data == nullptr) return nullptr;
    return reinterpret_cast<float*>(view.data) +
           (n * view.size[1] + head) * view.size[2] * view.size[3];
  }

  template <class Function>
  void each_head(int threads, float scale, const Function& function) const {
    const int64_t count = q_.size[0] * q_.size[1];
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local std::vector<float> memory;
      Head head{};
      const Room room = prepare(scale, head, memory);
      for (int64_t item = first; item < last; ++item) {
        const int64_t n = item / q_.size[1], at = item % q_.size[1];
        head.q = rows(q_, n, at), head.k = rows(k_, n, at), head.v = rows(v_, n, at);
        head.bias = rows(bias_, n, at), head.filled = rows(filled_, n, at);
        function(n, at, head, room);
      }
    };
    const int64_t work = count * q_.size[2] * k_.size[2] * (q_.size[3] + v_.size[3]);
    heads::in_parts(threads, count, work, run);
  }

  Room prepare(float scale, Head& head, std::vector<float>& memory) const {
    head.queries = q_.size[2], head.keys = k_.size[2];
    head.dim = q_.size[3], head.values = v_.size[3];
    head.padded_keys = padded(head.keys), head.padded_dim = padded(head.dim);
    head.padded_values = padded(head.values);
    head.scale = scale, head.fill = fill_, head.safe = safe_;
    head.dbias = {nullptr, 0};
    const int64_t keys = head.row = head.keys;
    head.wide = head.padded_keys;
    head.block = heads::block_of(head.wide);
    const int64_t queries = std::min(head.queries, head.block);
    const int64_t sizes[] = {head.dim * head.padded_keys, head.values * head.padded_keys,
                             queries * head.padded_dim,   keys * head.padded_dim,
                             keys * head.padded_values,   queries * head.padded_values,
                             queries * head.padded_keys,  queries * head.padded_keys,
                             queries * head.padded_keys,  queries};
    float* p[std::size(sizes)];
    heads::divide(memory, sizes, p);  // its padding stays zero
    return {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9]};
  }

  TensorView q_, k_, v_, bias_, filled_;
  float fill_ = 0.0f;
  bool safe_ = false;
  std::array<py::object, 2> kept_;  // callers make copies of masks that nothing else holds
};

}  // namespace
}  // namespace recast::attention

void bind_field_attention(py::module_& m) {
  using recast::attention::Attention;
  py::class_<Attention>(m, "FieldAttention")
      .def("forward", &Attention::forward)
      .def("backward", &Attention::backward, py::arg("upstream"), py::arg("scale"),
           py::arg("noise"), py::arg("weights"), py::arg("dq"), py::arg("dk"), py::arg("dv"),
           py::arg("threads"), py::arg("dbias") = py::none());
  m.def("field_attention", &Attention::make, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("bias") = py::none(), py::arg("filled") = py::none(), py::arg("fill") = 0.0f,
        py::arg("safe") = false);
}
