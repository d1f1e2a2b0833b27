// Row gradients of all tables of a call at once: creates them, and assigns them to the tables,
// without running Python per table (runtime/rows/lots.py).
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
  Name grad{"grad"}, cell{"cell"}, lot{"lot"}, number{"number"}, is_leaf{"is_leaf"},
      wants{"requires_grad"}, hooks{"_backward_hooks"}, after{"_post_accumulate_grad_hooks"};
  static const Words& get() {
    static const Words* words = new Words();
    return *words;
  }
};

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
  // Whether the weight is a leaf without a gradient and without hooks, not frozen since forward.
  static bool is_free(const py::object& weight) {
    const Words& words = Words::get();
    if (words.is_leaf.of(weight).ptr() != Py_True || !words.grad.of(weight).is_none()) return false;
    if (words.wants.of(weight).ptr() != Py_True) return false;
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

}  // namespace

void bind_row_lots(py::module_& module) {
  module.def("copied_ids", &copied_ids, py::arg("ids"), py::arg("empty"));
  py::class_<Grads>(module, "RowGrads", "Row gradients of many tables; see lots.py.")
      .def(py::init<py::object, py::object, py::object>(), py::arg("wrapper"), py::arg("grad"),
           py::arg("cell"))
      .def("make", &Grads::make, py::arg("like"), py::arg("lot"), py::arg("device"))
      .def("place", &Grads::place, py::arg("weights"), py::arg("grads"), py::arg("edges"),
           py::arg("runs"), py::arg("held"));
}
