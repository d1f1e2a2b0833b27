// Python bindings of row updates.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "row_update.h"
#include "row_update_read.h"
#include "tensor.h"

namespace py = pybind11;
using namespace recast::rows;
using recast::Dtype;
using recast::TensorView;

namespace {

// Fields of `Update`.
enum Field {
  kAction,
  kWeight,
  kGrad,
  kStates,
  kLr,
  kEps,
  kBetas,
  kDecay,
  kL2,
  kAhead,
  kFactor,
  kGradScale,
  kFoundInf,
  kSeed,
  kAges,
  kFields
};

// A step on many tables: sorted when made, done by run().
class Step {
 public:
  // `pieces`, if given, are used in place of those of the gradients.
  Step(const std::vector<py::tuple>& updates, const py::object& pieces, int threads) {
    std::vector<Plan::Table> tables;
    std::vector<Piece> all_pieces;
    for (size_t i = 0; i < updates.size(); ++i) {
      const py::object cell = Names::get().cell.of(updates[i][kGrad]);
      const py::list own =
          pieces.is_none() ? py::list(Names::get().pieces.of(cell)) : py::list(py::list(pieces)[i]);
      if (add(updates[i], cell, own, tables, all_pieces))
        taken_.push_back(i);
      else
        left_.push_back(i);
    }
    try {
      if (!tables.empty()) plan_ = sort(std::move(tables), std::move(all_pieces), threads);
    } catch (const BadInput& bad) {
      throw error_of(taken_[bad.table], bad);
    }
  }

  void run() {
    if (plan_ == nullptr) return;
    const py::gil_scoped_release release;
    plan_->run(targets_);
  }

  const std::vector<size_t>& left() const { return left_; }

 private:
  bool add(const py::tuple& update, const py::object& cell, const py::list& pieces,
           std::vector<Plan::Table>& tables, std::vector<Piece>& all_pieces) {
    if (update.size() != kFields) throw std::invalid_argument("row update: not an Update");
    PyObject* const* const field = &PyTuple_GET_ITEM(update.ptr(), 0);
    if (field[kGradScale] != Py_None || field[kFoundInf] != Py_None) return false;
    Target to{};
    Formats formats;
    TensorView weight;
    if (!read_action(field[kAction], to.action)) return false;
    if (!read_target(field[kWeight], &PyTuple_GET_ITEM(field[kStates], 0),
                     PyTuple_GET_SIZE(field[kStates]), to, weight, formats))
      return false;
    read_numbers(&field[kLr], to);
    if (field[kAges] != Py_None && (to.narrow || to.narrow_state)) return false;
    const bool needs_ages = to.action == Action::momentum || to.action == Action::rmsprop;
    if (field[kAges] == Py_None && needs_ages) return false;
    if (field[kAges] != Py_None && Names::get().last.of(field[kAges]).is_none()) {
      if (!read_whole(Names::get().betas.of(field[kAges]), weight, to)) return false;
    } else if (field[kAges] != Py_None) {
      if (to.state.data == nullptr) return false;
      read_ages(field[kAges], weight.size[0], to.ages);
    }
    to.scale = static_cast<float>(number(field[kFactor]) * factor(Names::get().scale.of(cell)));
    to.at_random = to.narrow && field[kSeed] != Py_None;
    if (to.at_random) to.seed = PyLong_AsUnsignedLongLongMask(field[kSeed]);
    if (!read_table(pieces, weight.size[0], weight.size[1], formats, tables, all_pieces))
      return false;
    targets_.push_back(to);
    return true;
  }

  std::unique_ptr<Plan> plan_;
  std::vector<Target> targets_;
  std::vector<size_t> taken_, left_;
};

// The sum of pieces by row: sorted when made, stored by store().
class Sum {
 public:
  Sum(const py::list& pieces, int64_t rows, int64_t dim, int threads) {
    std::vector<Plan::Table> tables;
    std::vector<Piece> all_pieces;
    if (!read_table(pieces, rows, dim, {}, tables, all_pieces)) return;
    try {
      plan_ = sort(std::move(tables), std::move(all_pieces), threads);
    } catch (const BadInput& bad) {
      throw error_of(bad.table, bad);
    }
  }

  // How many rows have a gradient; -1 when the pieces cannot be read.
  int64_t count() const { return plan_ == nullptr ? -1 : plan_->counts()[0]; }

  // Writes (count,) int64 ids and (count, dim) fp32 rows.
  void store(const py::object& ids, const py::object& rows) {
    TensorView to_ids, to_rows;
    if (!read(ids, to_ids) || !read(rows, to_rows) || to_ids.dtype != Dtype::int64 ||
        to_rows.dtype != Dtype::float32 || to_ids.size[0] != count())
      throw std::invalid_argument("row sum: nowhere to store");
    Target to{};
    to.action = Action::store;
    to.weight = to_rows.data;
    to.stride = to_rows.stride[0];
    to.ids = reinterpret_cast<int64_t*>(to_ids.data);
    const py::gil_scoped_release release;
    plan_->run({to});
  }

 private:
  std::unique_ptr<Plan> plan_;
};

// Brings the moments of a table to step ages.now, or begins its ages there.
template <void (*function)(const Moments&, const Ages&, int)>
void of_moments(const py::tuple& tensors, const py::object& ages, int threads) {
  TensorView views[2];
  Moments moments{};
  moments.count = static_cast<int>(tensors.size());
  if (moments.count != 1 && moments.count != 2)
    throw std::invalid_argument("row ages: one moment, or two");
  for (int i = 0; i < moments.count; ++i) {
    TensorView& view = views[i];
    if (!read(tensors[static_cast<size_t>(i)], view) || view.dims != 2 ||
        !are_rows(view, view.size[1]) || view.dtype != Dtype::float32 ||
        view.size[0] != views[0].size[0] || view.size[1] != views[0].size[1])
      throw std::invalid_argument("row ages: not moments");
    moments.data[i] = reinterpret_cast<float*>(view.data);
    moments.stride[i] = view.stride[0];
  }
  moments.rows = views[0].size[0];
  moments.dim = views[0].size[1];
  Ages read{};
  read_ages(ages.ptr(), moments.rows, read);
  const py::gil_scoped_release release;
  function(moments, read, threads);
}

// Adds one to each of the 0-dimensional tensors; false, having done nothing, if one cannot be read.
bool count_steps(const py::list& steps) {
  std::vector<TensorView> views(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!read(steps[i], views[i]) || views[i].numel() != 1) return false;
    if (views[i].dtype != Dtype::float32 && views[i].dtype != Dtype::float64) return false;
  }
  for (const TensorView& view : views) {
    if (view.dtype == Dtype::float32)
      *reinterpret_cast<float*>(view.data) += 1.0f;
    else
      *reinterpret_cast<double*>(view.data) += 1.0;
  }
  return true;
}

}  // namespace

void bind_row_update(py::module_& module) {
  py::class_<Step>(module, "RowStep", "The updates of many tables; see rows/kernel.py.")
      .def(py::init<const std::vector<py::tuple>&, const py::object&, int>(), py::arg("updates"),
           py::arg("pieces"), py::arg("threads"))
      .def_property_readonly("left", &Step::left, "Indices of updates that cannot be done here.")
      .def("run", &Step::run);
  py::class_<Sum>(module, "RowSum", "The sum of pieces by row; see rows/kernel.py.")
      .def(py::init<const py::list&, int64_t, int64_t, int>(), py::arg("pieces"), py::arg("rows"),
           py::arg("dim"), py::arg("threads"))
      .def("count", &Sum::count, "Rows with a gradient; -1: the pieces cannot be read.")
      .def("store", &Sum::store, py::arg("ids"), py::arg("rows"));
  module.def("settle_moments", &of_moments<settle>, py::arg("moments"), py::arg("ages"),
             py::arg("threads"), "Bring one moment or two to the step of their ages.");
  module.def("begin_ages", &of_moments<begin>, py::arg("moments"), py::arg("ages"),
             py::arg("threads"), "Fill in ages, from moments of this step.");
  module.def("count_steps", &count_steps, py::arg("steps"),
             "Add one to each 0-dimensional tensor; False where the kernels cannot.");
}
