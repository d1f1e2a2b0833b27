// The steps of a gated recurrent unit, forward and backward. Products that do not depend on the
// previous step are left out: the caller does them for all steps at once.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "feature_rows.h"
#include "isa.h"
#include "parallel.h"

namespace py = pybind11;

namespace recast::gru {
namespace {

constexpr int64_t kSequences = 4;  // processed together: they share each load of the weight

// Sequences of one length are stored one after the other; packed ones step by step, the longest
// first, `counts` of them at each step.
struct Call {
  int64_t sequences, steps, size, width;  // `width`: size, padded to whole registers
  bool keeps;
  const int64_t *counts, *begins;       // null when all have one length
  const float *weight, *bias;           // padded
  const float *start, *scores, *zeros;  // null: zeros, ones
  float *gates, *kept, *out;
  const float *of_out, *of_last;
  float *of_gates, *of_kept, *before, *of_scores, *of_start;

  int64_t active(int64_t t, int64_t first) const {
    const int64_t there = counts == nullptr ? sequences : counts[t];
    return std::min(kSequences, std::max<int64_t>(0, there - first));
  }
  int64_t place(int64_t t, int64_t sequence) const {
    return counts == nullptr ? sequence * steps + t : begins[t] + sequence;
  }
  float score(int64_t at) const { return scores == nullptr ? 1.0f : scores[at]; }
};

}  // namespace
}  // namespace recast::gru

#define RECAST_KERNEL "gru_kernel.h"
#include "each_isa.h"

namespace recast::gru {
namespace {

constexpr int64_t kWorthThreads = 1 << 12;  // numbers of h from which a second thread pays

// The data of a contiguous float32 tensor of this shape; null for None.
float* dense(const py::handle& tensor, int64_t rows, int64_t columns) {
  if (tensor.is_none()) return nullptr;
  TensorView view;
  const bool read = TensorReader::get().read(tensor.ptr(), view) && view.dtype == Dtype::float32 &&
                    view.dims == 2 && view.size[0] == rows && view.size[1] == columns &&
                    unit_stride(view) && (rows <= 1 || view.stride[0] == columns);
  if (!read) throw py::value_error("gru: a tensor does not fit");
  return reinterpret_cast<float*>(view.data);
}

// `size` in whole registers of the instruction set in force.
int64_t padded(int64_t size) {
  const int64_t lanes = isa() == Isa::avx512 ? 16 : isa() == Isa::avx2 ? 8 : 4;
  return (size + lanes - 1) / lanes * lanes;
}

// The arguments that forward and backward share: sizes, and where each step is.
class Steps {
 public:
  // `counts`: int64, descending, one per step; None when all sequences have `steps` steps.
  Steps(const py::handle& counts, int64_t sequences, int64_t steps, int64_t size, bool keeps)
      : zeros_(static_cast<size_t>(size), 0.0f) {
    call = Call{};
    call.sequences = sequences, call.steps = steps, call.size = size, call.width = padded(size);
    call.keeps = keeps;
    call.zeros = zeros_.data();
    rows = sequences * steps;
    if (counts.is_none()) return;
    TensorView view;
    const bool read = TensorReader::get().read(counts.ptr(), view) && view.dims == 1 &&
                      view.dtype == Dtype::int64 && view.size[0] == steps;
    if (!read) throw py::value_error("gru: the batch sizes do not fit");
    rows = 0;
    for (int64_t t = 0; t < steps; ++t) {
      const int64_t here = reinterpret_cast<const int64_t*>(view.data)[t * view.stride[0]];
      const int64_t most = t == 0 ? sequences : counts_.back();
      if (here < 0 || here > most || (t == 0 && here != most))
        throw py::value_error("gru: the batch sizes do not fall");
      counts_.push_back(here);
      begins_.push_back(rows);
      rows += here;
    }
    call.counts = counts_.data();
    call.begins = begins_.data();
  }

  template <class Function>
  void each(int threads, const Function& function) const {
    const int64_t groups = (call.sequences + kSequences - 1) / kSequences;
    const size_t scratch = static_cast<size_t>(4 * kSequences * call.width);
    if (groups <= 1 || call.sequences * call.size < kWorthThreads) threads = 1;
    const int64_t parts = std::max(threads, 1);
    parallel_static(threads, parts, [&](int64_t part, int) {
      std::vector<float> own(scratch, 0.0f);
      for (int64_t i = groups * part / parts; i < groups * (part + 1) / parts; ++i)
        function(i * kSequences, own.data());
    });
  }

  Call call;
  int64_t rows;  // of all steps

 private:
  std::vector<float> zeros_;
  std::vector<int64_t> counts_, begins_;
};

// `gates` (rows, 3 H): what x adds to the gates, overwritten by the gates; `weight` (3 H, H);
// `bias` (1, 3 H), `start` (B, H), `scores` (rows, 1) and `kept` (rows, H) may be None.
void forward(const py::handle& counts, int64_t sequences, int64_t steps, const py::handle& weight,
             const py::handle& bias, const py::handle& start, const py::handle& scores, bool keeps,
             const py::handle& gates, const py::handle& kept, const py::handle& out, int threads) {
  TensorView view;
  if (!TensorReader::get().read(out.ptr(), view) || view.dims != 2)
    throw py::value_error("gru: a tensor does not fit");
  const int64_t size = view.size[1];
  Steps all(counts, sequences, steps, size, keeps);
  Call& call = all.call;
  call.gates = dense(gates, all.rows, 3 * size);
  call.kept = dense(kept, all.rows, size);
  call.out = dense(out, all.rows, size);
  call.start = dense(start, sequences, size);
  call.scores = dense(scores, all.rows, 1);
  const float *const w = dense(weight, 3 * size, size), *const b = dense(bias, 1, 3 * size);
  const py::gil_scoped_release release;
  const int64_t width = call.width;
  std::vector<float> turned(static_cast<size_t>(size * 3 * width), 0.0f);
  std::vector<float> shift(static_cast<size_t>(3 * width), 0.0f);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t j = 0; j < size; ++j) {
      if (b != nullptr) shift[static_cast<size_t>(g * width + j)] = b[g * size + j];
      for (int64_t k = 0; k < size; ++k)
        turned[static_cast<size_t>((k * 3 + g) * width + j)] = w[(g * size + j) * size + k];
    }
  call.weight = turned.data();
  call.bias = shift.data();
  all.each(threads,
           [&](int64_t first, float* scratch) { RECAST_CHOOSE(forward)(call, first, scratch); });
}

// Writes `of_gates` (rows, 3 H), `of_kept` and `before`, the h that each step began with (rows, H);
// `of_scores` (rows, 1) and `of_start` (B, H) where they are not None.
void backward(const py::handle& counts, int64_t sequences, int64_t steps, const py::handle& weight,
              const py::handle& start, const py::handle& scores, bool keeps,
              const py::handle& gates, const py::handle& kept, const py::handle& out,
              const py::handle& of_out, const py::handle& of_last, const py::handle& of_gates,
              const py::handle& of_kept, const py::handle& before, const py::handle& of_scores,
              const py::handle& of_start, int threads) {
  TensorView view;
  if (!TensorReader::get().read(out.ptr(), view) || view.dims != 2)
    throw py::value_error("gru: a tensor does not fit");
  const int64_t size = view.size[1];
  Steps all(counts, sequences, steps, size, keeps);
  Call& call = all.call;
  call.gates = dense(gates, all.rows, 3 * size);
  call.kept = dense(kept, all.rows, size);
  call.out = dense(out, all.rows, size);
  call.start = dense(start, sequences, size);
  call.scores = dense(scores, all.rows, 1);
  call.of_out = dense(of_out, all.rows, size);
  call.of_last = dense(of_last, sequences, size);
  call.of_gates = dense(of_gates, all.rows, 3 * size);
  call.of_kept = dense(of_kept, all.rows, size);
  call.before = dense(before, all.rows, size);
  call.of_scores = dense(of_scores, all.rows, 1);
  call.of_start = dense(of_start, sequences, size);
  const float* const w = dense(weight, 3 * size, size);
  const py::gil_scoped_release release;
  const int64_t width = call.width;
  std::vector<float> wide(static_cast<size_t>(3 * width * width), 0.0f);
  for (int64_t g = 0; g < 3; ++g)
    for (int64_t j = 0; j < size; ++j)
      for (int64_t k = 0; k < size; ++k)
        wide[static_cast<size_t>((g * width + j) * width + k)] = w[(g * size + j) * size + k];
  call.weight = wide.data();
  all.each(threads,
           [&](int64_t first, float* scratch) { RECAST_CHOOSE(backward)(call, first, scratch); });
}

}  // namespace
}  // namespace recast::gru

void bind_gru(py::module_& m) {
  m.def("gru_forward", &recast::gru::forward);
  m.def("gru_backward", &recast::gru::backward);
}
