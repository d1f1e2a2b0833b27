// Two gradients of pooled lookups (runtime/embedding/backward.py): for max pooling that of the rows
// that won, for sums that of the per-sample weights.

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "embedding_lookup.h"
#include "parallel.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::embedding {
namespace {

// Elements below which a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 15;

bool is_matrix(const TensorView& view) {
  return view.dims == 2 && (view.stride[1] == 1 || view.size[1] <= 1);
}

int64_t parts_of(int64_t elements, int threads) {
  return elements < kWorthThreads ? 1 : std::max(threads, 1);
}

// ---------------------------------------------------------------- maxima

// The winners of some bags: each once per bag, and for each column the index of its winner within
// the bag (-1: none).
struct Part {
  int64_t first, last;
  std::vector<int64_t> ids;
  std::vector<int32_t> slots;   // of each column of each bag
  std::vector<int32_t> counts;  // winners of each bag
};

void find(const TensorView& winner, Part& part) {
  const int64_t dim = winner.size[1];
  part.slots.resize((part.last - part.first) * dim);
  part.counts.reserve(part.last - part.first);
  int32_t* slot = part.slots.data();
  for (int64_t b = part.first; b < part.last; ++b) {
    const int64_t* won = reinterpret_cast<const int64_t*>(winner.data) + b * winner.stride[0];
    const size_t before = part.ids.size();
    for (int64_t c = 0; c < dim; ++c, ++slot) {
      if (won[c] < 0) {
        *slot = -1;
        continue;
      }
      const auto begin = part.ids.begin() + static_cast<int64_t>(before);
      const auto found = std::find(begin, part.ids.end(), won[c]);  // among a few
      *slot = static_cast<int32_t>(found - begin);
      if (found == part.ids.end()) part.ids.push_back(won[c]);
    }
    part.counts.push_back(static_cast<int32_t>(part.ids.size() - before));
  }
}

template <class T>
void place(const Part& part, const TensorView& grad, int64_t start, int64_t* ids, T* rows) {
  const int64_t dim = grad.size[1];
  std::copy(part.ids.begin(), part.ids.end(), ids + start);
  T* row = rows + start * dim;
  std::fill_n(row, part.ids.size() * static_cast<size_t>(dim), T{0});
  const int32_t* slot = part.slots.data();
  for (int64_t b = part.first; b < part.last; ++b) {
    const T* from = reinterpret_cast<const T*>(grad.data) + b * grad.stride[0];
    for (int64_t c = 0; c < dim; ++c, ++slot)
      if (*slot >= 0) row[*slot * dim + c] = from[c];
    row += part.counts[b - part.first] * dim;
  }
}

// (ids, rows): for each bag one row per id that won a column, zero in its other columns. `winner`:
// (bags, dim) ids, -1 in empty bags; `empty(count)` allocates ids and rows. None when the kernels
// do not take these tensors.
py::object won_rows(const py::handle& winner, const py::handle& grad, const py::object& empty,
                    int threads) {
  const TensorReader& reader = TensorReader::get();
  TensorView won, from, ids, rows;
  if (!reader.read(winner.ptr(), won) || !reader.read(grad.ptr(), from)) return py::none();
  if (won.dtype != Dtype::int64 || !is_matrix(won) || !is_matrix(from)) return py::none();
  if (won.size[0] != from.size[0] || won.size[1] != from.size[1]) return py::none();
  const bool single = from.dtype == Dtype::float32;
  if (!single && from.dtype != Dtype::float16 && from.dtype != Dtype::bfloat16) return py::none();

  const int64_t bags = won.size[0], count = std::max<int64_t>(parts_of(won.numel(), threads), 1);
  std::vector<Part> parts(count);
  for (int64_t i = 0; i < count; ++i) {
    parts[i].first = bags * i / count;
    parts[i].last = bags * (i + 1) / count;
  }
  {
    const py::gil_scoped_release release;
    parallel_static(static_cast<int>(count), count, [&](int64_t i, int) { find(won, parts[i]); });
  }
  std::vector<int64_t> starts(count + 1, 0);
  for (int64_t i = 0; i < count; ++i)
    starts[i + 1] = starts[i] + static_cast<int64_t>(parts[i].ids.size());

  py::tuple made = empty(starts[count]);
  if (!reader.read(py::handle(made[0]).ptr(), ids) || !reader.read(py::handle(made[1]).ptr(), rows))
    throw py::value_error("won_rows: no room");
  if (ids.dtype != Dtype::int64 || ids.numel() != starts[count] || rows.dtype != from.dtype ||
      rows.numel() != starts[count] * from.size[1])
    throw py::value_error("won_rows: no room");
  {
    const py::gil_scoped_release release;
    auto* const to = reinterpret_cast<int64_t*>(ids.data);
    parallel_static(static_cast<int>(count), count, [&](int64_t i, int) {
      if (single)
        place(parts[i], from, starts[i], to, reinterpret_cast<uint32_t*>(rows.data));
      else
        place(parts[i], from, starts[i], to, reinterpret_cast<uint16_t*>(rows.data));
    });
  }
  return std::move(made);
}

// ---------------------------------------------------------------- per-sample weights

// Independent partial sums, side by side.
constexpr int64_t kLanes = 8;

float product(const float* a, const float* b, int64_t dim) {
  float sums[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes)
    for (int64_t k = 0; k < kLanes; ++k) sums[k] += a[c + k] * b[c + k];
  float sum = 0;
  for (const float part : sums) sum += part;
  for (; c < dim; ++c) sum += a[c] * b[c];
  return sum;
}

struct Samples {
  TensorView grad, table, ids, offsets, out;
  bool has_offsets;
  int64_t padding;

  int64_t bags() const { return grad.size[0]; }
  // The ids of bag b; ids after the end of the last bag belong to none.
  std::pair<int64_t, int64_t> range(int64_t b) const {
    const int64_t count = ids.numel();
    if (!has_offsets) return {b * ids.size[1], (b + 1) * ids.size[1]};
    const int64_t last =
        b + 1 < offsets.size[0] ? load(offsets, (b + 1) * offsets.stride[0]) : count;
    return {load(offsets, b * offsets.stride[0]), last};
  }

  // False when an id or offset is out of range: the forward pass checked them, so they have been
  // overwritten since.
  bool run(int64_t b) const {
    const auto [first, last] = range(b);
    if (first < 0 || last < first || last > ids.numel()) return false;
    const float* upstream = reinterpret_cast<const float*>(grad.data) + b * grad.stride[0];
    auto* const to = reinterpret_cast<float*>(out.data);
    for (int64_t i = first; i < last; ++i) {
      const int64_t id = load(ids, i);
      if (id < 0 || id >= table.size[0]) return false;
      const float* row = reinterpret_cast<const float*>(table.data) + id * table.stride[0];
      to[i] = id == padding ? 0.0F : product(upstream, row, table.size[1]);
    }
    return true;
  }
};

// The gradient of the per-sample weights, (grad of the bag) · (row of the id), into `out`, which is
// zero and has the shape of ids. False, with `out` undefined, when the kernels do not take these
// tensors or an id is out of range.
bool sample_weights(const py::handle& grad, const py::handle& table, const py::handle& ids,
                    const py::object& offsets, int64_t padding, const py::handle& out,
                    int threads) {
  const TensorReader& reader = TensorReader::get();
  Samples s;
  s.has_offsets = !offsets.is_none();
  s.padding = padding;
  if (!reader.read(grad.ptr(), s.grad) || !reader.read(table.ptr(), s.table)) return false;
  if (!reader.read(ids.ptr(), s.ids) || !reader.read(out.ptr(), s.out)) return false;
  if (s.has_offsets && (!reader.read(offsets.ptr(), s.offsets) || !is_int(s.offsets))) return false;
  for (const TensorView* view : {&s.grad, &s.table, &s.out})
    if (view->dtype != Dtype::float32) return false;
  if (!is_matrix(s.grad) || !is_matrix(s.table) || s.grad.size[1] != s.table.size[1]) return false;
  int64_t stride = 1;
  if (!is_int(s.ids) || !flat_stride(s.ids, stride) || (stride != 1 && s.ids.numel() > 1))
    return false;
  if (!flat_stride(s.out, stride) || (stride != 1 && s.out.numel() > 1)) return false;
  if (s.out.numel() != s.ids.numel()) return false;
  if (s.has_offsets) {
    if (s.ids.dims != 1 || s.offsets.dims != 1 || s.offsets.size[0] < s.bags()) return false;
  } else if (s.ids.dims != 2 || s.ids.size[0] != s.bags()) {
    return false;
  }
  const py::gil_scoped_release release;
  const int64_t count = s.bags(), parts = parts_of(s.ids.numel() * s.table.size[1], threads);
  std::atomic<bool> good{true};
  parallel_static(static_cast<int>(parts), count, [&](int64_t b, int) {
    if (!s.run(b)) good = false;
  });
  return good;
}

}  // namespace
}  // namespace recast::embedding

void bind_bag_gradients(py::module_& m) {
  m.def("won_rows", &recast::embedding::won_rows, py::arg("winner"), py::arg("grad"),
        py::arg("empty"), py::arg("threads"));
  m.def("sample_weights", &recast::embedding::sample_weights, py::arg("grad"), py::arg("table"),
        py::arg("ids"), py::arg("offsets"), py::arg("padding"), py::arg("out"), py::arg("threads"));
}
