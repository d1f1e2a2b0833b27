// Row gradients of all tables of a call at once: creates them, assigns them to the tables, and
// steps the tables, without running Python per table (runtime/rows/lots.py).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "row_update.h"
#include "row_update_read.h"
#include "tensor.h"

namespace py = pybind11;
using namespace recast::rows;
using recast::Dtype;
using recast::TensorView;

namespace {

struct Words {
  Name grad{"grad"}, cell{"cell"}, full{"full"}, lot{"lot"}, number{"number"}, pieces{"pieces"},
      scale{"scale"}, version{"version"}, seen{"_version"}, ids{"ids"}, starts{"starts"},
      rows{"rows"}, fixed{"fixed"}, mean{"mean"}, padding{"padding"}, shape{"shape"},
      dtype{"dtype"}, is_leaf{"is_leaf"}, hooks{"_backward_hooks"},
      after{"_post_accumulate_grad_hooks"};
  PyObject* const step = PyUnicode_InternFromString("step");
  static const Words& get() {
    static const Words* words = new Words();
    return *words;
  }
};

void set(const py::handle& object, const Name& name, const py::handle& value) {
  if (PyObject_SetAttr(object.ptr(), name.text(), value.ptr()) != 0) throw py::error_already_set();
}

int64_t whole(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// ---------------------------------------------------------------- copies of ids

// A flat copy of all `ids`, (n,) or (bags, n) of one integer type, allocated by `empty(count,
// wide)`; where each begins, and the end; the ids per bag of each. None for any other tensors.
py::object copied_ids(const py::list& ids, const py::object& empty) {
  const size_t count = ids.size();
  std::vector<TensorView> views(count);
  py::list starts(count + 1), fixed(count);
  int64_t total = 0;
  for (size_t k = 0; k < count; ++k) {
    TensorView& view = views[k];
    if (!read(ids[k], view) || view.dims < 1 || view.dims > 2) return py::none();
    if (view.dtype != Dtype::int64 && view.dtype != Dtype::int32) return py::none();
    if (view.dtype != views[0].dtype) return py::none();
    starts[k] = total;
    fixed[k] = view.dims == 2 ? view.size[1] : 1;
    total += view.numel();
  }
  starts[count] = total;
  if (count == 0) return py::none();
  const bool wide = is_wide(views[0]);
  py::object room = empty(total, wide);
  TensorView into;
  if (!read(room, into) || into.numel() != total || into.dtype != views[0].dtype)
    throw py::value_error("copied_ids: no room");
  const size_t size = wide ? 8 : 4;
  char* to = into.data;
  for (const TensorView& view : views) {
    const int64_t rows = view.dims == 2 ? view.size[0] : 1, width = view.size[view.dims - 1];
    const int64_t step = view.stride[view.dims - 1], apart = view.dims == 2 ? view.stride[0] : 0;
    const bool dense = (step == 1 || width <= 1) && (apart == width || rows <= 1);
    const auto bytes = static_cast<size_t>(rows * width) * size;
    if (dense) {
      if (bytes > 0) std::memcpy(to, view.data, bytes);
    } else {
      char* at = to;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < width; ++c, at += size)
          std::memcpy(at, view.data + static_cast<size_t>(r * apart + c * step) * size, size);
    }
    to += bytes;
  }
  return py::make_tuple(std::move(room), std::move(starts), std::move(fixed));
}

// ---------------------------------------------------------------- gradients

// Python's RowGrad and Cell, and the function that makes a tensor without storage.
class Grads {
 public:
  Grads(py::object wrapper, py::object grad, py::object cell)
      : wrapper_(std::move(wrapper)), grad_(std::move(grad)), cell_(std::move(cell)) {
    names_ = py::make_tuple("dtype", "device");
    nothing_ = py::tuple(0);
  }

  // One gradient per (shape, dtype) of `like`; the k-th is number k of `lot`.
  py::list make(const py::list& like, const py::object& lot, const py::object& device) const {
    const Words& words = Words::get();
    py::list made(like.size());
    auto* const type = reinterpret_cast<PyTypeObject*>(cell_.ptr());
    for (size_t k = 0; k < like.size(); ++k) {
      const py::object cell = take(type->tp_new(type, nothing_.ptr(), nullptr));
      set(cell, words.lot, lot);
      set(cell, words.number, py::int_(k));
      PyObject* const of = PyList_GET_ITEM(like.ptr(), static_cast<Py_ssize_t>(k));
      PyObject* const given[] = {grad_.ptr(), PyTuple_GET_ITEM(of, 0), PyTuple_GET_ITEM(of, 1),
                                 device.ptr()};
      py::object grad = take(PyObject_Vectorcall(wrapper_.ptr(), given, 2, names_.ptr()));
      set(grad, words.cell, cell);
      made[k] = std::move(grad);
    }
    return made;
  }

  // Sets each weight's gradient itself if that cannot be observed (see left_to_autograd). Returns
  // the gradients that are left to autograd, and None in place of the others. `edges`: (node,
  // number) of each weight; `runs(node)`: whether the running backward pass accumulates there, an
  // error if it returns gradients instead; `held`: the reference count of a node that only `edges`
  // and torch hold.
  py::list place(const py::sequence& weights, const py::sequence& grads, const py::tuple& edges,
                 const py::object& runs, Py_ssize_t held) const {
    const Words& words = Words::get();
    py::list left(grads.size());
    for (size_t k = 0; k < grads.size(); ++k) {
      const py::object grad = grads[k];
      bool placed = false;
      if (k < edges.size() && reinterpret_cast<PyObject*>(Py_TYPE(grad.ptr())) == grad_.ptr()) {
        const py::object weight = weights[k];
        PyObject* const edge = PyTuple_GET_ITEM(edges.ptr(), static_cast<Py_ssize_t>(k));
        placed = is_free(weight) && ends(PyTuple_GET_ITEM(edge, 0), runs, held);
        if (placed) set(weight, words.grad, grad);
      }
      left[k] = placed ? py::object(py::none()) : grad;
    }
    return left;
  }

 private:
  // Whether the weight is a leaf without a gradient and without hooks.
  static bool is_free(const py::object& weight) {
    const Words& words = Words::get();
    if (words.is_leaf.of(weight).ptr() != Py_True || !words.grad.of(weight).is_none()) return false;
    return !truth(words.hooks.of(weight)) && !truth(words.after.of(weight));
  }

  static bool truth(const py::object& object) {
    if (object.is_none()) return false;
    const int found = PyObject_IsTrue(object.ptr());
    if (found < 0) throw py::error_already_set();
    return found != 0;
  }

  // A node with other references may have hooks.
  static bool ends(PyObject* node, const py::object& runs, Py_ssize_t held) {
    if (node == Py_None || Py_REFCNT(node) > held) return false;
    PyObject* const found = PyObject_CallOneArg(runs.ptr(), node);
    if (found == nullptr) {
      if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();
      PyErr_Clear();
      return false;
    }
    const bool yes = found == Py_True;
    Py_DECREF(found);
    return yes;
  }

  py::object wrapper_, grad_, cell_, names_, nothing_;
};

// ---------------------------------------------------------------- steps

// A lot as the kernels read it.
struct Lot {
  PyObject* object = nullptr;
  TensorView ids;
  py::object starts, fixed, mean, padding, rows, version;
  bool stacked = false;
  TensorView stack;  // (bags, tables, dim)
};

// A step on tables with row gradients, straight from an optimizer's own lists.
class GroupStep {
 public:
  explicit GroupStep(py::object grad) : grad_(std::move(grad)) {}

  // Takes the parameters of a group that have row gradients and returns the others; None when one
  // of them cannot be read here, so that Python must do the whole step. `update`: the action of an
  // `Update`, and its fields from lr to factor.
  py::object add(const py::list& params, const py::dict& state, const py::tuple& names,
                 const py::tuple& update) {
    const Words& words = Words::get();
    py::list left;
    Target like{};
    if (!read_action(PyTuple_GET_ITEM(update.ptr(), 0), like.action)) return py::none();
    read_numbers(&PyTuple_GET_ITEM(update.ptr(), 1), like);
    for (const py::handle parameter : params) {
      const py::object grad = words.grad.of(parameter);
      if (reinterpret_cast<PyObject*>(Py_TYPE(grad.ptr())) != grad_.ptr()) {
        left.append(parameter);
        continue;
      }
      if (!add_table(parameter, words.cell.of(grad), state, names, like,
                     number(PyTuple_GET_ITEM(update.ptr(), 7))))
        return py::none();
    }
    return std::move(left);
  }

  // Updates all tables and counts their steps. False, having done nothing, if an id is wrong.
  bool run(int threads) {
    try {
      plan_ = sort(std::move(tables_), std::move(pieces_), threads);
    } catch (const BadId&) {
      return false;
    } catch (const std::invalid_argument&) {
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

  size_t count() const { return targets_.size(); }
  const py::list& written() const { return written_; }

 private:
  bool add_table(const py::handle& weight, const py::object& cell, const py::dict& state,
                 const py::tuple& names, const Target& like, double scale) {
    const Words& words = Words::get();
    if (!words.full.of(cell).is_none()) return false;
    Target to = like;
    Formats formats;
    TensorView view, step;
    PyObject* states[2] = {};
    const Py_ssize_t count = PyTuple_GET_SIZE(names.ptr());
    PyObject* counter = nullptr;
    if (count > 0) {
      PyObject* const own = PyDict_GetItemWithError(state.ptr(), weight.ptr());
      if (own == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (own == nullptr || !PyDict_CheckExact(own) || count > 2) return false;
      for (Py_ssize_t s = 0; s < count; ++s) {
        states[s] = PyDict_GetItemWithError(own, PyTuple_GET_ITEM(names.ptr(), s));
        if (states[s] == nullptr) return false;
      }
      counter = PyDict_GetItemWithError(own, words.step);
      if (counter == nullptr || !read(counter, step) || step.numel() != 1) return false;
      if (step.dtype != Dtype::float32 && step.dtype != Dtype::float64) return false;
    }
    if (!read_target(weight.ptr(), states, count, to, view, formats)) return false;
    to.scale = static_cast<float>(scale * factor(words.scale.of(cell)));
    const py::object lot = words.lot.of(cell);
    const bool taken = lot.is_none()
                           ? add_pieces(cell, view, formats)
                           : add_lot(lot, whole(words.number.of(cell).ptr()), view, formats);
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

  // Pieces that Python has asked for, or that other operations made.
  bool add_pieces(const py::object& cell, const TensorView& weight, const Formats& formats) {
    const Words& words = Words::get();
    const py::list pieces = words.pieces.of(cell);
    for (const py::handle piece : pieces) {
      const int64_t version = whole(words.version.of(piece).ptr());
      if (version < 0) continue;
      if (version != whole(words.seen.of(words.rows.of(piece)).ptr())) return false;
    }
    return read_table(pieces, weight.size[0], weight.size[1], formats, tables_, pieces_);
  }

  bool add_lot(const py::object& object, int64_t number, const TensorView& weight,
               Formats formats) {
    if (object.ptr() != lot_.object && !read_lot(object)) return false;
    const auto k = static_cast<Py_ssize_t>(number);
    const int64_t first = whole(PyList_GET_ITEM(lot_.starts.ptr(), k));
    Piece piece{};
    piece.wide_ids = is_wide(lot_.ids);
    piece.ids = lot_.ids.data + first * (piece.wide_ids ? 8 : 4);
    piece.n_ids = whole(PyList_GET_ITEM(lot_.starts.ptr(), k + 1)) - first;
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
      const int64_t version = whole(PyList_GET_ITEM(lot_.version.ptr(), k));
      if (version >= 0 && version != whole(Words::get().seen.of(own).ptr())) return false;
      if (!read(own, rows) || !are_rows(rows, weight.size[1])) return false;
      if (!formats.add(rows.dtype, narrow)) return false;
      piece.gradient = rows.data;
      piece.stride = rows.stride[0] * (narrow ? 2 : 4);
      piece.n_bags = rows.size[0];
    }
    piece.fixed = whole(PyList_GET_ITEM(lot_.fixed.ptr(), k));
    piece.mean = PyTuple_GET_ITEM(lot_.mean.ptr(), k) == Py_True;
    piece.padding = whole(PyTuple_GET_ITEM(lot_.padding.ptr(), k));
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
      const int64_t version = whole(lot_.version.ptr());
      if (version >= 0 && version != whole(words.seen.of(lot_.rows).ptr())) return false;
      if (!read(lot_.rows, lot_.stack) || lot_.stack.dims != 3) return false;
      if (lot_.stack.stride[2] != 1 && lot_.stack.size[2] != 1) return false;
    }
    lot_.object = object.ptr();
    held_ = object;
    return true;
  }

  py::object grad_, held_;
  py::list written_;
  std::vector<Plan::Table> tables_;
  std::vector<Piece> pieces_;
  std::vector<Target> targets_;
  std::vector<TensorView> steps_;
  std::unique_ptr<Plan> plan_;
  Lot lot_;
};

}  // namespace

void bind_row_lots(py::module_& module) {
  module.def("copied_ids", &copied_ids, py::arg("ids"), py::arg("empty"));
  py::class_<Grads>(module, "RowGrads", "Row gradients of many tables; see lots.py.")
      .def(py::init<py::object, py::object, py::object>(), py::arg("wrapper"), py::arg("grad"),
           py::arg("cell"))
      .def("make", &Grads::make, py::arg("like"), py::arg("lot"), py::arg("device"))
      .def("place", &Grads::place, py::arg("weights"), py::arg("grads"), py::arg("edges"),
           py::arg("runs"), py::arg("held"));
  py::class_<GroupStep>(module, "GroupStep", "A step on the tables of an optimizer; see group.py.")
      .def(py::init<py::object>(), py::arg("grad"))
      .def("add", &GroupStep::add, py::arg("params"), py::arg("state"), py::arg("names"),
           py::arg("update"))
      .def("run", &GroupStep::run, py::arg("threads"))
      .def_property_readonly("count", &GroupStep::count)
      .def_property_readonly("written", &GroupStep::written);
}
