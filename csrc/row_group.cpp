// A step on all tables of an optimizer that have row gradients, without running Python per table
// (runtime/rows/native_step.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "row_update.h"
#include "row_update_read.h"
#include "tensor.h"

namespace py = pybind11;
using namespace recast::rows;
using recast::Dtype;
using recast::TensorReader;
using recast::TensorView;

namespace {

struct Words {
  Name grad{"grad"}, cell{"cell"}, full{"full"}, lot{"lot"}, number{"number"}, pieces{"pieces"},
      scale{"scale"}, sparse{"sparse"}, version{"version"}, seen{"_version"}, ids{"ids"},
      starts{"starts"}, rows{"rows"}, fixed{"fixed"}, mean{"mean"}, padding{"padding"};
  // Of a Way, and of Ages.
  Name action{"action"}, states{"states"}, numbers{"numbers"}, counts{"counts"}, sign{"sign"},
      betas{"betas"}, setting{"setting"}, whole{"whole"}, ages{"ages"}, moments{"moments"},
      done{"done"}, now{"now"}, lr{"lr"}, shrinks{"shrinks"}, place{"place"};
  PyObject* const step = PyUnicode_InternFromString("step");
  static const Words& get() {
    static const Words* words = new Words();
    return *words;
  }
};

bool is_type(PyObject* object, const py::object& type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
}

// The item of a dict, which keeps it; null: none.
PyObject* item(PyObject* dict, PyObject* key) {
  PyObject* const found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// A lot as the kernels read it.
struct Lot {
  PyObject* object = nullptr;
  TensorView ids;
  py::object starts, fixed, mean, padding, rows, version;
  bool stacked = false;
  TensorView stack;  // (bags, tables, dim)
};

// How a group is stepped: a `Way` of Python.
class Way {
 public:
  explicit Way(const py::object& way) {
    const Words& words = Words::get();
    known_ = read_action(words.action.of(way).ptr(), like_.action);
    states = words.states.of(way);
    numbers_ = words.numbers.of(way);
    counts = words.counts.of(way).cast<bool>();
    sign = number(words.sign.of(way).ptr());
    betas = words.betas.of(way);
    setting = words.setting.of(way);
    whole = integer(words.whole.of(way).ptr());
  }

  // How a table is stepped after so many steps, and by how much more its rows without gradient
  // move.
  struct Numbers {
    double steps;
    Target to;
    double moves;
  };

  const Numbers& after(double steps) {
    for (const Numbers& one : found_)
      if (one.steps == steps) return one;
    const py::tuple numbers = numbers_(steps);
    PyObject* const* const field = &PyTuple_GET_ITEM(numbers.ptr(), 0);
    Numbers made{steps, like_, number(field[0])};
    read_numbers(field, made.to);
    const double ahead = number(field[5]);
    if (ahead != 0.0) made.moves *= ahead;
    found_.push_back(made);
    return found_.back();
  }

  bool known() const { return known_; }
  Action action() const { return like_.action; }
  bool moves_all() const { return !betas.is_none(); }

  py::tuple states;
  bool counts;
  double sign;
  py::object betas, setting;
  int64_t whole;

 private:
  bool known_ = false;
  Target like_{};
  py::object numbers_;
  std::vector<Numbers> found_;
};

// A step on tables with row gradients, straight from an optimizer's own lists. Until `run`, all is
// left as it is.
class GroupStep {
 public:
  GroupStep(py::object grad, py::object moment)
      : grad_(std::move(grad)), moment_(std::move(moment)) {}

  // Takes the parameters of a group that have row gradients and returns the others; None when one
  // of them cannot be read here, so that Python must do the whole step. `how`: a `Way`; None: there
  // is none for row gradients.
  py::object add(const py::list& params, const py::dict& state, const py::object& how) {
    py::list left;
    std::vector<PyObject*> taken;
    std::unique_ptr<Way> way;
    for (const py::handle parameter : params) {
      const py::object grad = Words::get().grad.of(parameter);
      if (!is_type(grad.ptr(), grad_)) {
        left.append(parameter);
        continue;
      }
      if (how.is_none()) return py::none();
      if (way == nullptr) way = std::make_unique<Way>(how);
      if (!way->known() || !add_table(parameter, Words::get().cell.of(grad), state, *way))
        return py::none();
      taken.push_back(parameter.ptr());
    }
    std::sort(taken.begin(), taken.end());
    const bool twice = std::adjacent_find(taken.begin(), taken.end()) != taken.end();
    if (twice && way->moves_all()) return py::none();  // torch warned of it; Python steps it once
    return std::move(left);
  }

  // Updates all tables and counts their steps. False, having done nothing, if ids or offsets are
  // wrong.
  bool run(int threads) {
    try {
      plan_ = sort(std::move(tables_), std::move(pieces_), threads);
    } catch (const BadInput&) {
      return false;
    }
    {
      const py::gil_scoped_release release;
      plan_->run(targets_);
    }
    for (const TensorView& step : steps_) {
      if (step.dtype == Dtype::float32)
        *reinterpret_cast<float*>(step.data) += 1.0f;
      else
        *reinterpret_cast<double*>(step.data) += 1.0;
    }
    return true;
  }

  // Lets the ages know, once the versions of all tensors are those after the step.
  void end() const {
    const Words& words = Words::get();
    for (const Aged& one : aged_) {
      const py::int_ now(one.now);
      set(one.ages, words.now, now);
      set(one.ages, words.done, now);
      set(one.ages, words.lr, py::float_(one.lr));
      set(one.ages, words.version, words.seen.of(one.weight));
    }
  }

  size_t count() const { return targets_.size(); }
  const py::list& written() const { return written_; }

 private:
  // A table with ages that takes the step, of which its rows move by `lr` times their moments.
  struct Aged {
    py::object ages, weight;
    int32_t now;
    double lr;
  };

  bool add_table(const py::handle& weight, const py::object& cell, const py::dict& state,
                 Way& way) {
    const Words& words = Words::get();
    if (!words.full.of(cell).is_none()) return false;
    PyObject* states[2] = {};
    PyObject* counter = nullptr;
    TensorView view, step;
    const Py_ssize_t count = PyTuple_GET_SIZE(way.states.ptr());
    if (count > 0) {
      PyObject* const own = item(state.ptr(), weight.ptr());
      if (own == nullptr || !PyDict_CheckExact(own) || count > 2) return false;
      for (Py_ssize_t s = 0; s < count; ++s) {
        states[s] = item(own, PyTuple_GET_ITEM(way.states.ptr(), s));
        if (states[s] == nullptr || states[s] == Py_None) return false;
      }
      counter = item(own, words.step);
    }
    double done = 1.0;  // momentum begins once, and does not count
    const bool counted = count > 0 && way.action() != Action::momentum;
    if (counted != (counter != nullptr)) return false;
    if (counted) {
      if (!read(counter, step) || step.numel() != 1) return false;
      if (step.dtype == Dtype::float32)
        done = *reinterpret_cast<const float*>(step.data);
      else if (step.dtype == Dtype::float64)
        done = *reinterpret_cast<const double*>(step.data);
      else
        return false;
    }
    const Way::Numbers& numbers = way.after(way.counts ? done : 0.0);
    Target to = numbers.to;
    Formats formats;
    if (!way.moves_all()) {
      if (!read_target(weight.ptr(), states, count, to, view, formats)) return false;
    } else if (!read_moving(weight, cell, states, way, counted ? &done : nullptr, numbers.moves, to,
                            view, formats)) {
      return false;
    }
    to.scale = static_cast<float>(way.sign * factor(words.scale.of(cell)));
    const py::object lot = words.lot.of(cell);
    const bool taken = lot.is_none()
                           ? add_pieces(cell, view, formats)
                           : add_lot(lot, integer(words.number.of(cell).ptr()), view, formats);
    if (!taken) return false;
    targets_.push_back(to);
    written_.append(weight);
    for (Py_ssize_t s = 0; s < count; ++s) written_.append(py::handle(states[s]));
    if (counter != nullptr) {
      written_.append(py::handle(counter));
      steps_.push_back(step);
    }
    return true;
  }

  // A table whose rows all move: either small, with ordinary moments, or with ages that still hold.
  // `states` become those that are written.
  bool read_moving(const py::handle& weight, const py::object& cell, PyObject** states,
                   const Way& way, const double* done, double moves, Target& to, TensorView& view,
                   Formats& formats) {
    const Words& words = Words::get();
    const TensorReader& reader = TensorReader::get();
    const Py_ssize_t count = PyTuple_GET_SIZE(way.states.ptr());
    if (words.sparse.of(cell).ptr() != Py_False || !reader.is_plain(weight.ptr())) return false;
    if (!read(weight, view) || view.dims != 2 || view.numel() == 0) return false;
    if (view.numel() * std::max<int64_t>(view.size[1], 16) <= way.whole) {
      for (Py_ssize_t s = 0; s < count; ++s)
        if (!reader.is_plain(states[s])) return false;
      return read_target(weight.ptr(), states, count, to, view, formats) &&
             read_whole(way.betas, view, to);
    }
    if (count == 0 || way.setting.is_none() || !is_type(states[0], moment_)) return false;
    Aged aged{words.ages.of(states[0]), py::reinterpret_borrow<py::object>(weight), 0, moves};
    const py::object& ages = aged.ages;
    for (Py_ssize_t s = 1; s < count; ++s)
      if (!is_type(states[s], moment_) || !words.ages.of(states[s]).is(ages)) return false;
    const py::tuple moments = words.moments.of(ages);
    if (PyTuple_GET_SIZE(moments.ptr()) != count) return false;
    for (Py_ssize_t s = 0; s < count; ++s) states[s] = PyTuple_GET_ITEM(moments.ptr(), s);
    if (!read_target(weight.ptr(), states, count, to, view, formats)) return false;
    if (to.narrow || to.narrow_state || to.stride != view.size[1]) return false;
    const int64_t before = integer(words.done.of(ages).ptr());
    if (before < 1 || before >= std::numeric_limits<int32_t>::max()) return false;
    if (done != nullptr && *done != static_cast<double>(before)) return false;
    if (reinterpret_cast<uintptr_t>(view.data) !=
        PyLong_AsUnsignedLongLongMask(words.place.of(ages).ptr()))
      return false;
    if (!words.setting.of(ages).equal(way.setting)) return false;
    read_ages(ages.ptr(), view.size[0], to.ages);
    aged.now = to.ages.now = static_cast<int32_t>(before + 1);
    const double shrinks = number(words.shrinks.of(ages).ptr());
    to.ages.wake = moves * shrinks > number(words.lr.of(ages).ptr()) ||
                   integer(words.seen.of(weight).ptr()) != integer(words.version.of(ages).ptr());
    aged_.push_back(std::move(aged));
    return true;
  }

  // Pieces that Python has asked for, or that other operations made.
  bool add_pieces(const py::object& cell, const TensorView& weight, const Formats& formats) {
    const Words& words = Words::get();
    const py::list pieces = words.pieces.of(cell);
    for (const py::handle piece : pieces) {
      const int64_t version = integer(words.version.of(piece).ptr());
      if (version < 0) continue;
      if (version != integer(words.seen.of(words.rows.of(piece)).ptr())) return false;
    }
    return read_table(pieces, weight.size[0], weight.size[1], formats, tables_, pieces_);
  }

  bool add_lot(const py::object& object, int64_t number, const TensorView& weight,
               Formats formats) {
    if (object.ptr() != lot_.object && !read_lot(object)) return false;
    const auto k = static_cast<Py_ssize_t>(number);
    const int64_t first = integer(PyList_GET_ITEM(lot_.starts.ptr(), k));
    Piece piece{};
    piece.wide_ids = is_wide(lot_.ids);
    piece.ids = lot_.ids.data + first * (piece.wide_ids ? 8 : 4);
    piece.n_ids = integer(PyList_GET_ITEM(lot_.starts.ptr(), k + 1)) - first;
    bool narrow = false;
    TensorView rows;
    if (lot_.stacked) {
      if (!formats.add(lot_.stack.dtype, narrow) || lot_.stack.size[2] != weight.size[1])
        return false;
      piece.gradient = lot_.stack.data + k * lot_.stack.stride[1] * (narrow ? 2 : 4);
      piece.stride = lot_.stack.stride[0] * (narrow ? 2 : 4);
      piece.n_bags = lot_.stack.size[0];
    } else {
      const py::handle own = PyList_GET_ITEM(lot_.rows.ptr(), k);
      const int64_t version = integer(PyList_GET_ITEM(lot_.version.ptr(), k));
      if (version >= 0 && version != integer(Words::get().seen.of(own).ptr())) return false;
      if (!read(own, rows) || !are_rows(rows, weight.size[1])) return false;
      if (!formats.add(rows.dtype, narrow)) return false;
      piece.gradient = rows.data;
      piece.stride = rows.stride[0] * (narrow ? 2 : 4);
      piece.n_bags = rows.size[0];
    }
    piece.fixed = integer(PyList_GET_ITEM(lot_.fixed.ptr(), k));
    piece.mean = PyTuple_GET_ITEM(lot_.mean.ptr(), k) == Py_True;
    piece.padding = integer(PyTuple_GET_ITEM(lot_.padding.ptr(), k));
    piece.factor = 1.0f;
    if (weight.size[0] > kMost || piece.n_ids > kMost) return false;
    pieces_.push_back(piece);
    tables_.push_back(
        {weight.size[0], weight.size[1], pieces_.size() - 1, pieces_.size(), formats.half, narrow});
    return true;
  }

  bool read_lot(const py::object& object) {
    const Words& words = Words::get();
    lot_.object = nullptr;
    if (!are_indices(words.ids.of(object), lot_.ids)) return false;
    lot_.starts = words.starts.of(object);
    lot_.fixed = words.fixed.of(object);
    lot_.mean = words.mean.of(object);
    lot_.padding = words.padding.of(object);
    lot_.rows = words.rows.of(object);
    lot_.version = words.version.of(object);
    lot_.stacked = !PyList_CheckExact(lot_.rows.ptr());
    if (lot_.stacked) {
      const int64_t version = integer(lot_.version.ptr());
      if (version >= 0 && version != integer(words.seen.of(lot_.rows).ptr())) return false;
      if (!read(lot_.rows, lot_.stack) || lot_.stack.dims != 3) return false;
      if (lot_.stack.stride[2] != 1 && lot_.stack.size[2] != 1) return false;
    }
    lot_.object = object.ptr();
    held_ = object;
    return true;
  }

  py::object grad_, moment_, held_;
  py::list written_;
  std::vector<Plan::Table> tables_;
  std::vector<Piece> pieces_;
  std::vector<Target> targets_;
  std::vector<TensorView> steps_;
  std::vector<Aged> aged_;
  std::unique_ptr<Plan> plan_;
  Lot lot_;
};

}  // namespace

void bind_row_group(py::module_& module) {
  py::class_<GroupStep>(module, "GroupStep", "A step on the tables of an optimizer.")
      .def(py::init<py::object, py::object>(), py::arg("grad"), py::arg("moment"))
      .def("add", &GroupStep::add, py::arg("params"), py::arg("state"), py::arg("how"))
      .def("run", &GroupStep::run, py::arg("threads"))
      .def("end", &GroupStep::end)
      .def_property_readonly("count", &GroupStep::count)
      .def_property_readonly("written", &GroupStep::written);
}
