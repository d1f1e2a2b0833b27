// Row updates as Python sees them: reads `Piece` and `Update` objects (runtime/rows/pieces.py,
// update.py) where they are, since every number handed over by Python would cost more than its
// use here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "row_update.h"
#include "tensor.h"

namespace py = pybind11;
using namespace recast::rows;
using recast::Dtype;
using recast::TensorReader;
using recast::TensorView;

namespace {

// Rows and gradients are numbered by 32 bits, and one number says "none".
constexpr int64_t kMost = (int64_t{1} << 32) - 2;

py::object take(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// A factor that may be missing.
double factor(const py::object& object) { return object.is_none() ? 1.0 : number(object.ptr()); }

// An attribute by its interned name.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object of(const py::handle& object) const {
    return take(PyObject_GetAttr(object.ptr(), name_));
  }

 private:
  PyObject* name_;
};

struct Names {
  Name ids{"ids"}, rows{"rows"}, offsets{"offsets"}, weights{"weights"}, fixed{"fixed"},
      mean{"mean"}, padding{"padding_idx"}, scale{"scale"}, cell{"cell"}, pieces{"pieces"};
  static const Names& get() {
    static const Names* names = new Names();
    return *names;
  }
};

bool read(const py::handle& tensor, TensorView& view) {
  return TensorReader::get().read(tensor.ptr(), view);
}

bool is_flat(const TensorView& view) {
  return view.dims == 1 && (view.stride[0] == 1 || view.size[0] <= 1);
}

bool are_rows(const TensorView& view, int64_t dim) {
  return view.dims == 2 && view.size[1] == dim && (view.stride[1] == 1 || dim == 1);
}

bool is_wide(const TensorView& ints) { return ints.dtype == Dtype::int64; }

bool are_indices(const py::handle& tensor, TensorView& view) {
  return read(tensor, view) && is_flat(view) &&
         (view.dtype == Dtype::int64 || view.dtype == Dtype::int32);
}

// The 16-bit format of all numbers of a table that are not fp32: there can be one.
class Formats {
 public:
  // False for a dtype that the kernels do not know beside those before.
  bool add(Dtype dtype, bool& narrow) {
    narrow = dtype == Dtype::float16 || dtype == Dtype::bfloat16;
    if (!narrow) return dtype == Dtype::float32;
    const Half found = dtype == Dtype::float16 ? Half::fp16 : Half::bf16;
    if (half != Half::none && half != found) return false;
    half = found;
    return true;
  }
  Half half = Half::none;
};

// False where the piece has to be made plainer first, or cannot be read here at all.
bool read_piece(const py::handle& object, int64_t dim, Formats& formats, bool& narrow,
                Piece& piece) {
  const Names& names = Names::get();
  TensorView ids, rows;
  if (!are_indices(names.ids.of(object), ids)) return false;
  if (!read(names.rows.of(object), rows) || !are_rows(rows, dim)) return false;
  if (!formats.add(rows.dtype, narrow)) return false;
  piece = {};
  piece.ids = ids.data;
  piece.wide_ids = is_wide(ids);
  piece.n_ids = ids.size[0];
  piece.gradient = rows.data;
  piece.stride = rows.stride[0] * (narrow ? 2 : 4);
  piece.n_bags = rows.size[0];
  const py::object offsets = names.offsets.of(object), weights = names.weights.of(object);
  TensorView view;
  if (!offsets.is_none()) {
    if (!are_indices(offsets, view)) return false;
    piece.offsets = view.data;
    piece.wide_offsets = is_wide(view);
    piece.n_offsets = view.size[0];
  }
  if (!weights.is_none()) {
    if (!read(weights, view) || !is_flat(view) || view.dtype != Dtype::float32) return false;
    piece.weights = reinterpret_cast<const float*>(view.data);
  }
  piece.fixed = names.fixed.of(object).cast<int64_t>();
  piece.mean = names.mean.of(object).cast<bool>();
  const py::object padding = names.padding.of(object);
  piece.padding = padding.is_none() ? -1 : padding.cast<int64_t>();
  piece.factor = static_cast<float>(factor(names.scale.of(object)));
  return true;
}

// Appends a table and its pieces; false, and nothing is appended, where they cannot be read.
bool read_table(const py::list& objects, int64_t rows, int64_t dim, Formats formats,
                std::vector<Plan::Table>& tables, std::vector<Piece>& pieces) {
  const size_t first = pieces.size();
  int64_t entries = 0;
  bool narrow = false, readable = rows <= kMost;
  for (size_t i = 0; i < objects.size() && readable; ++i) {
    Piece piece;
    bool narrow_piece = false;
    readable = read_piece(objects[i], dim, formats, narrow_piece, piece) &&
               (i == 0 || narrow_piece == narrow);
    narrow = narrow_piece;
    entries += piece.n_ids;
    pieces.push_back(piece);
  }
  if (!readable || entries > kMost) {
    pieces.resize(first);
    return false;
  }
  tables.push_back({rows, dim, first, pieces.size(), formats.half, narrow});
  return true;
}

std::unique_ptr<Plan> sort(std::vector<Plan::Table> tables, std::vector<Piece> pieces,
                           int threads) {
  const py::gil_scoped_release release;
  return std::make_unique<Plan>(std::move(tables), std::move(pieces), threads);
}

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
  kFactor,
  kGradScale,
  kFoundInf,
  kSeed,
  kFields
};

bool read_action(PyObject* text, Action& action) {
  constexpr std::pair<const char*, Action> kActions[] = {
      {"sgd", Action::sgd},
      {"adagrad", Action::adagrad},
      {"row_wise_adagrad", Action::row_wise_adagrad},
      {"adam", Action::adam}};
  for (const auto& [name, value] : kActions) {
    if (PyUnicode_CompareWithASCIIString(text, name) != 0) continue;
    action = value;
    return true;
  }
  return false;
}

// A step on many tables: sorted when made, done by run().
class Step {
 public:
  // `pieces` stand in for those of the gradients where given.
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
    } catch (const BadId& bad) {
      throw py::index_error(std::to_string(taken_[bad.table]) + " " + std::to_string(bad.id));
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
    if (!read_action(field[kAction], to.action) || !read(field[kWeight], weight)) return false;
    if (weight.dims != 2 || !are_rows(weight, weight.size[1])) return false;
    if (!formats.add(weight.dtype, to.narrow)) return false;
    to.weight = weight.data;
    to.stride = weight.stride[0];
    const Py_ssize_t states = PyTuple_GET_SIZE(field[kStates]);
    if (states != (to.action == Action::sgd ? 0 : to.action == Action::adam ? 2 : 1)) return false;
    for (Py_ssize_t s = 0; s < states; ++s) {
      TensorView view;
      if (!read(PyTuple_GET_ITEM(field[kStates], s), view)) return false;
      const bool fits =
          to.action == Action::row_wise_adagrad ? view.dims == 1 : are_rows(view, weight.size[1]);
      if (!fits || view.size[0] != weight.size[0]) return false;
      bool narrow = false;
      if (!formats.add(view.dtype, narrow) || (s == 1 && narrow != to.narrow_state)) return false;
      to.narrow_state = narrow;
      (s == 0 ? to.state : to.second) = {view.data, view.stride[0]};
    }
    to.scale = static_cast<float>(number(field[kFactor]) * factor(Names::get().scale.of(cell)));
    to.lr = static_cast<float>(number(field[kLr]));
    to.eps = static_cast<float>(number(field[kEps]));
    to.share = static_cast<float>(1.0 - number(PyTuple_GET_ITEM(field[kBetas], 0)));
    to.second_share = static_cast<float>(1.0 - number(PyTuple_GET_ITEM(field[kBetas], 1)));
    to.decay = static_cast<float>(number(field[kDecay]));
    to.l2 = static_cast<float>(number(field[kL2]));
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
    } catch (const BadId& bad) {
      throw py::index_error(std::to_string(bad.table) + " " + std::to_string(bad.id));
    }
  }

  // How many rows have a gradient; -1 where the pieces cannot be read.
  int64_t count() const { return plan_ == nullptr ? -1 : plan_->counts()[0]; }

  // To (count,) int64 ids and (count, dim) fp32 rows.
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

// Adds one to each of the 0-dimensional tensors; false, and nothing is done, where one cannot be.
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
  py::class_<Step>(module, "RowStep", "The updates of many tables; see row_kernel.py.")
      .def(py::init<const std::vector<py::tuple>&, const py::object&, int>(), py::arg("updates"),
           py::arg("pieces"), py::arg("threads"))
      .def_property_readonly("left", &Step::left, "Indices of updates that cannot be done here.")
      .def("run", &Step::run);
  py::class_<Sum>(module, "RowSum", "The sum of pieces by row; see row_kernel.py.")
      .def(py::init<const py::list&, int64_t, int64_t, int>(), py::arg("pieces"), py::arg("rows"),
           py::arg("dim"), py::arg("threads"))
      .def("count", &Sum::count, "Rows with a gradient; -1: the pieces cannot be read.")
      .def("store", &Sum::store, py::arg("ids"), py::arg("rows"));
  module.def("count_steps", &count_steps, py::arg("steps"),
             "Add one to each 0-dimensional tensor; False where the kernels cannot.");
}
