// Attention by silu instead of a softmax, as in HSTU: many samples and heads, short sequences.

#include <pybind11/pybind11.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "attention_heads.h"
#include "isa.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::silu_attention {

using heads::Rows;

struct Head {
  int64_t queries, keys, dim, values;  // rows of q, of k and v; elements of a row of q and k, of v
  int64_t padded_keys, padded_dim, padded_values;  // rounded up to whole registers
  int64_t wide;   // all keys, rounded up: `keys` may be some of them
  int64_t block;  // queries whose scores stay in L1
  float scale, factor;
  Rows q, k, v, out;  // out: its gradient in backward
  Rows dq, dk, dv;
  Rows bias, mask, dbias, dmask;  // (queries, keys), or null
};

// Memory of one thread.
struct Room {
  float *kt, *vt, *q, *k, *v, *grad, *a, *da;
};

}  // namespace recast::silu_attention

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "silu_attention_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::silu_attention {
namespace {

using heads::like, heads::padded, heads::reads, heads::rows;

class Attention {
 public:
  // Null when the kernels do not take these tensors.
  // `bias, mask`: (N, H, queries, keys) with contiguous rows, or None.
  static std::unique_ptr<Attention> make(const py::handle& q, const py::handle& k,
                                         const py::handle& v, float scale, float factor,
                                         const py::object& bias, const py::object& mask) {
    auto self = std::make_unique<Attention>();
    if (!reads(q, self->q_) || !reads(k, self->k_) || !reads(v, self->v_)) return nullptr;
    if (!like(self->q_, self->k_, 2) || !like(self->q_, self->v_, 2)) return nullptr;
    if (self->q_.size[3] != self->k_.size[3] || self->k_.size[2] != self->v_.size[2] ||
        self->k_.size[2] == 0)
      return nullptr;
    if (!self->plane_of(bias, self->bias_) || !self->plane_of(mask, self->mask_)) return nullptr;
    self->scale_ = scale, self->factor_ = factor;
    self->kept_bias_ = bias, self->kept_mask_ = mask;
    return self;
  }

  // `out`: (N, H, queries, values).
  void forward(const py::handle& out, int threads) const {
    TensorView o;
    if (!reads(out, o) || !fits_out(o))
      throw py::value_error("silu_attention: a tensor does not fit");
    const py::gil_scoped_release release;
    each_head(threads, [&](int64_t n, int64_t at, Head& head, const Room& room) {
      head.out = rows(o, n, at);
      RECAST_CHOOSE(forward)(head, room);
    });
  }

  // `upstream`: shaped like out; dq, dk, dv: like q, k, v; dbias, dmask: (N, H, queries, keys) or
  // None.
  void backward(const py::handle& upstream, const py::handle& dq, const py::handle& dk,
                const py::handle& dv, const py::object& dbias, const py::object& dmask,
                int threads) const {
    TensorView o, into_q, into_k, into_v, into_bias, into_mask;
    const bool good = reads(upstream, o) && fits_out(o) && reads(dq, into_q) && reads(dk, into_k) &&
                      reads(dv, into_v) && like(into_q, q_, 4) && like(into_k, k_, 4) &&
                      like(into_v, v_, 4) && plane_of(dbias, into_bias) &&
                      plane_of(dmask, into_mask);
    if (!good) throw py::value_error("silu_attention: a gradient does not fit");
    const py::gil_scoped_release release;
    each_head(threads, [&](int64_t n, int64_t at, Head& head, const Room& room) {
      head.out = rows(o, n, at);
      head.dq = rows(into_q, n, at), head.dk = rows(into_k, n, at);
      head.dv = rows(into_v, n, at);
      head.dbias = rows(into_bias, n, at), head.dmask = rows(into_mask, n, at);
      RECAST_CHOOSE(backward)(head, room);
    });
  }

 private:
  bool fits_out(const TensorView& out) const {
    return like(out, q_, 3) && out.size[3] == v_.size[3];
  }

  // A (N, H, queries, keys) with contiguous rows, which may be broadcast, or None.
  bool plane_of(const py::handle& tensor, TensorView& view) const {
    view.data = nullptr;
    if (tensor.is_none()) return true;
    return reads(tensor, view) && like(view, q_, 3) && view.size[3] == k_.size[2];
  }

  template <class Function>
  void each_head(int threads, const Function& function) const {
    const int64_t count = q_.size[0] * q_.size[1];
    const auto run = [&](int64_t first, int64_t last) {
      static thread_local std::vector<float> memory;
      Head head{};
      const Room room = prepare(head, memory);
      for (int64_t item = first; item < last; ++item) {
        const int64_t n = item / q_.size[1], at = item % q_.size[1];
        head.q = rows(q_, n, at), head.k = rows(k_, n, at), head.v = rows(v_, n, at);
        head.bias = rows(bias_, n, at), head.mask = rows(mask_, n, at);
        function(n, at, head, room);
      }
    };
    const int64_t work = count * q_.size[2] * k_.size[2] * (q_.size[3] + v_.size[3]);
    heads::in_parts(threads, count, work, run);
  }

  Room prepare(Head& head, std::vector<float>& memory) const {
    head.queries = q_.size[2], head.keys = k_.size[2];
    head.dim = q_.size[3], head.values = v_.size[3];
    head.padded_keys = padded(head.keys), head.padded_dim = padded(head.dim);
    head.padded_values = padded(head.values);
    head.scale = scale_, head.factor = factor_;
    head.wide = head.padded_keys;
    head.block = heads::block_of(head.wide);
    const int64_t keys = head.keys, queries = std::min(head.queries, head.block);
    const int64_t sizes[] = {head.dim * head.padded_keys, head.values * head.padded_keys,
                             queries * head.padded_dim,   keys * head.padded_dim,
                             keys * head.padded_values,   queries * head.padded_values,
                             queries * head.padded_keys,  queries * head.padded_keys};
    float* p[std::size(sizes)];
    heads::divide(memory, sizes, p);  // its padding stays zero
    return {p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
  }

  TensorView q_, k_, v_, bias_, mask_;
  float scale_ = 1.0f, factor_ = 1.0f;
  py::object kept_bias_, kept_mask_;  // callers make copies of masks that nothing else holds
};

}  // namespace
}  // namespace recast::silu_attention

void bind_silu_attention(py::module_& m) {
  using recast::silu_attention::Attention;
  py::class_<Attention>(m, "SiluAttention")
      .def("forward", &Attention::forward)
      .def("backward", &Attention::backward);
  m.def("silu_attention", &Attention::make);
}
