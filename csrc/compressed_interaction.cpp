// Compressed interaction (a layer of a CIN): blocks of samples are laid out feature by feature in
// scratch memory, where the kernels work; the products of all pairs are never stored.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

namespace recast::compressed {

// Matrices with rows of `columns` floats; see the kernels.
struct Block {
  int64_t columns, left, right, outputs;
  int64_t stride;      // of the weight: outputs rounded up
  const float *x, *y;  // (left, columns), (right, columns)
  float* out;          // (outputs, columns): the result, or the upstream gradient
  float *dx = nullptr, *dy = nullptr;
};

// The number of columns is a multiple of this: two of the widest registers.
constexpr int64_t kStep = 32;
// Outputs of the weight are padded to a multiple of every kernel's rows.
constexpr int64_t kRows = 16;

}  // namespace recast::compressed

#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "compressed_interaction_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

namespace recast::compressed {
namespace {

constexpr int64_t kScratch = 1 << 16;  // floats of a block's matrices: they stay in L2
// The gradient of the weight is summed in this many parts, which are then added in order: the
// result does not depend on the number of threads.
constexpr int64_t kParts = 16;

struct Weight {
  int64_t outputs, stride;
  std::vector<float> turned;  // (products, stride)
  std::vector<float> bias;    // (stride,)
};

class Interaction {
 public:
  // left: (B, H, D), right: (B, M, D), weight: (O, H * M) contiguous, bias: (O,) or None. Null when
  // the kernels do not take them.
  static std::unique_ptr<Interaction> make(const py::handle& left, const py::handle& right,
                                           const py::handle& weight, const py::object& bias) {
    auto self = std::make_unique<Interaction>();
    TensorView w, b;
    const TensorReader& reader = TensorReader::get();
    if (!reads(left, self->left_) || !reads(right, self->right_)) return nullptr;
    if (self->left_.size[0] != self->right_.size[0] || self->left_.size[2] != self->right_.size[2])
      return nullptr;
    const int64_t products = self->left_.size[1] * self->right_.size[1];
    if (!reader.read(weight.ptr(), w) || w.dtype != Dtype::float32 || w.dims != 2 ||
        w.size[1] != products || !unit_stride(w))
      return nullptr;
    const bool biased = !bias.is_none();
    if (biased && (!reader.read(bias.ptr(), b) || b.dtype != Dtype::float32 || b.dims != 1 ||
                   b.size[0] != w.size[0]))
      return nullptr;
    self->prepare(w, biased ? &b : nullptr);
    return self;
  }

  // result: (B, O, D).
  void forward(const py::handle& result, bool relu, int threads) const {
    TensorView out;
    fits(result, weight_.outputs, out);
    const py::gil_scoped_release release;
    each_block(threads, false, [&](Block& block, int64_t first, int64_t last, int64_t) {
      RECAST_CHOOSE(forward)(block, weight_.turned.data(), weight_.bias.data(), relu);
      unpack(block.out, block.columns, out, first, last);
    });
  }

  // upstream (B, O, D), masked already; into_left (B, H, D), into_right (B, M, D), into_weight
  // (O, H * M) and into_bias (O,), contiguous.
  void backward(const py::handle& upstream, const py::handle& into_left,
                const py::handle& into_right, const py::handle& into_weight,
                const py::handle& into_bias, int threads) const {
    TensorView grad, dx, dy, dw, db;
    fits(upstream, weight_.outputs, grad);
    fits(into_left, left_.size[1], dx);
    fits(into_right, right_.size[1], dy);
    const TensorReader& reader = TensorReader::get();
    const int64_t products = left_.size[1] * right_.size[1];
    if (!reader.read(into_weight.ptr(), dw) || !reader.read(into_bias.ptr(), db) ||
        dw.numel() != weight_.outputs * products || db.numel() != weight_.outputs)
      throw py::value_error("compressed_interaction: a gradient does not fit");
    const py::gil_scoped_release release;
    std::vector<float> of_weight(static_cast<size_t>(kParts * weight_.outputs * products));
    std::vector<float> of_bias(static_cast<size_t>(kParts * weight_.outputs));
    each_block(threads, true, [&](Block& block, int64_t first, int64_t last, int64_t part) {
      pack(grad, first, last, block.columns, block.out);
      std::fill(block.dx, block.dx + (block.left + block.right) * block.columns, 0.0f);
      RECAST_CHOOSE(of_inputs)(block, weight_.turned.data());
      RECAST_CHOOSE(of_weight)
      (block, of_weight.data() + part * weight_.outputs * products,
       of_bias.data() + part * weight_.outputs);
      unpack(block.dx, block.columns, dx, first, last);
      unpack(block.dy, block.columns, dy, first, last);
    });
    add_parts(of_weight, reinterpret_cast<float*>(dw.data), weight_.outputs * products);
    add_parts(of_bias, reinterpret_cast<float*>(db.data), weight_.outputs);
  }

 private:
  static bool reads(const py::handle& tensor, TensorView& view) {
    return TensorReader::get().read(tensor.ptr(), view) && view.dtype == Dtype::float32 &&
           view.dims == 3 && unit_stride(view);
  }

  void fits(const py::handle& tensor, int64_t rows, TensorView& view) const {
    if (!reads(tensor, view) || view.size[0] != left_.size[0] || view.size[1] != rows ||
        view.size[2] != left_.size[2])
      throw py::value_error("compressed_interaction: a tensor does not fit");
  }

  void prepare(const TensorView& w, const TensorView* b) {
    const int64_t outputs = w.size[0], products = w.size[1];
    const int64_t stride = (outputs + kRows - 1) / kRows * kRows;
    weight_ = {outputs, stride, std::vector<float>(static_cast<size_t>(products * stride)),
               std::vector<float>(static_cast<size_t>(stride))};
    for (int64_t o = 0; o < outputs; ++o) {
      const auto* row = reinterpret_cast<const float*>(w.data) + o * w.stride[0];
      for (int64_t j = 0; j < products; ++j)
        weight_.turned[static_cast<size_t>(j * stride + o)] = row[j];
      if (b != nullptr)
        weight_.bias[static_cast<size_t>(o)] =
            reinterpret_cast<const float*>(b->data)[o * b->stride[0]];
    }
  }

  // Rows are short: a memcpy call for each would take as long as the arithmetic.
  static void copy(const float* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) std::memcpy(to + i, from + i, 4 * sizeof(float));
    for (; i < count; ++i) to[i] = from[i];
  }

  // to[row][(b - first) D + d] = from[b][row][d]; columns after the last sample are zero.
  static void pack(const TensorView& from, int64_t first, int64_t last, int64_t columns,
                   float* to) {
    const int64_t dim = from.size[2], used = (last - first) * dim;
    for (int64_t row = 0; row < from.size[1]; ++row, to += columns) {
      for (int64_t b = first; b < last; ++b) {
        const auto* source =
            reinterpret_cast<const float*>(from.data) + b * from.stride[0] + row * from.stride[1];
        copy(source, to + (b - first) * dim, dim);
      }
      std::fill(to + used, to + columns, 0.0f);
    }
  }

  static void unpack(const float* from, int64_t columns, const TensorView& to, int64_t first,
                     int64_t last) {
    const int64_t dim = to.size[2];
    for (int64_t row = 0; row < to.size[1]; ++row, from += columns)
      for (int64_t b = first; b < last; ++b) {
        auto* target = reinterpret_cast<float*>(to.data) + b * to.stride[0] + row * to.stride[1];
        copy(from + (b - first) * dim, target, dim);
      }
  }

  static void add_parts(const std::vector<float>& parts, float* to, int64_t count) {
    std::fill(to, to + count, 0.0f);
    for (int64_t part = 0; part < kParts; ++part)
      for (int64_t i = 0; i < count; ++i) to[i] += parts[static_cast<size_t>(part * count + i)];
  }

  // Calls function(block, first sample, last sample, part) with x and y packed.
  template <class Function>
  void each_block(int threads, bool gradients, const Function& function) const {
    const int64_t batch = left_.size[0], dim = left_.size[2];
    const int64_t left = left_.size[1], right = right_.size[1], outputs = weight_.outputs;
    if (batch == 0 || dim == 0) return;
    const int64_t rows = (left + right) * (gradients ? 2 : 1) + outputs;
    const int64_t samples = std::max<int64_t>(1, std::max(kStep, kScratch / rows) / dim);
    const int64_t columns = (samples * dim + kStep - 1) / kStep * kStep;
    const int64_t blocks = (batch + samples - 1) / samples;
    const auto run = [&](int64_t part) {
      static thread_local std::vector<float> scratch;
      scratch.resize(static_cast<size_t>(rows * columns));
      float* next = scratch.data();
      const auto take = [&](int64_t count) {
        float* const taken = next;
        next += count * columns;
        return taken;
      };
      float *const x = take(left), *const y = take(right), *const out = take(outputs);
      Block block{columns, left, right, outputs, weight_.stride, x, y, out};
      if (gradients) {
        block.dx = take(left);
        block.dy = take(right);
      }
      for (int64_t i = blocks * part / kParts; i < blocks * (part + 1) / kParts; ++i) {
        const int64_t first = i * samples, last = std::min(batch, first + samples);
        pack(left_, first, last, columns, x);
        pack(right_, first, last, columns, y);
        function(block, first, last, part);
      }
    };
    parallel_dynamic(blocks <= 1 ? 1 : threads, kParts, [&](int64_t part, int) { run(part); });
  }

  TensorView left_, right_;
  Weight weight_;
};

}  // namespace
}  // namespace recast::compressed

void bind_compressed_interaction(py::module_& m) {
  using recast::compressed::Interaction;
  py::class_<Interaction>(m, "CompressedInteraction")
      .def("forward", &Interaction::forward)
      .def("backward", &Interaction::backward);
  m.def("compressed_interaction", &Interaction::make);
}
