// Reads torch tensors through their Python attributes, so that no torch header is needed and one
// binary serves every version of torch. About 0.2 us a tensor.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace recast {

enum class Dtype { float32, float64, int32, int64, other };

struct TensorView {
  static constexpr int kMaxDims = 4;
  char* data = nullptr;
  Dtype dtype = Dtype::other;
  int dims = 0;
  int64_t size[kMaxDims] = {};
  int64_t stride[kMaxDims] = {};

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < dims; ++d) n *= size[d];
    return n;
  }
};

class TensorReader {
 public:
  // Made once, under the GIL; keeps its Python objects for the life of the process.
  static const TensorReader& get() {
    static const TensorReader* reader = new TensorReader();
    return *reader;
  }

  // False when the kernels cannot read `tensor` where it is: not on the CPU, no storage of its own,
  // or more than kMaxDims dimensions. Throws what torch throws.
  bool read(PyObject* tensor, TensorView& view) const {
    if (!truth(PyObject_GetAttr(tensor, is_cpu_))) return false;
    view.dtype = dtype(tensor);
    const pybind11::object shape = take(PyObject_GetAttr(tensor, shape_));
    const pybind11::object stride = take(PyObject_CallMethodNoArgs(tensor, stride_));
    const Py_ssize_t dims = PyTuple_GET_SIZE(shape.ptr());
    if (dims > TensorView::kMaxDims) return false;
    view.dims = static_cast<int>(dims);
    for (int d = 0; d < view.dims; ++d) {
      view.size[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), d));
      view.stride[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride.ptr(), d));
    }
    const pybind11::object data = take(PyObject_CallMethodNoArgs(tensor, data_ptr_));
    view.data = static_cast<char*>(PyLong_AsVoidPtr(data.ptr()));
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    return view.data != nullptr || view.numel() == 0;
  }

 private:
  TensorReader() {
    const pybind11::module_ torch = pybind11::module_::import("torch");
    const char* names[] = {"float32", "float64", "int32", "int64"};
    for (int i = 0; i < 4; ++i) dtypes_[i] = pybind11::object(torch.attr(names[i])).release().ptr();
    is_cpu_ = PyUnicode_InternFromString("is_cpu");
    shape_ = PyUnicode_InternFromString("shape");
    stride_ = PyUnicode_InternFromString("stride");
    dtype_ = PyUnicode_InternFromString("dtype");
    data_ptr_ = PyUnicode_InternFromString("data_ptr");
  }

  static pybind11::object take(PyObject* object) {
    if (object == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(object);
  }

  static bool truth(PyObject* object) { return take(object).ptr() == Py_True; }

  Dtype dtype(PyObject* tensor) const {
    const pybind11::object found = take(PyObject_GetAttr(tensor, dtype_));
    for (int i = 0; i < 4; ++i)
      if (found.ptr() == dtypes_[i]) return static_cast<Dtype>(i);
    return Dtype::other;
  }

  PyObject* dtypes_[4];
  PyObject *is_cpu_, *shape_, *stride_, *dtype_, *data_ptr_;
};

}  // namespace recast
