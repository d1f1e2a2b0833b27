// Reads torch tensors without torch's headers, so that one binary serves every version of torch:
// through DLPack's exchange table where torch has one (some 30 ns per tensor), else through Python
// attributes (0.3 us).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace recast {

enum class Dtype { float32, float64, int32, int64, float16, bfloat16, uint8, other };

// The part of DLPack 1.x that is used here; https://dmlc.github.io/dlpack gives the layout.
namespace dlpack {

struct Tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ExchangeApi {
  uint32_t major, minor;
  ExchangeApi* previous;
  void* owning[3];
  int (*borrow)(void* object, Tensor* out);  // the memory stays the object's; -1: a Python error
  void* stream;
};

constexpr int32_t kCpu = 1;
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4;

}  // namespace dlpack

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
  // Created once, under the GIL; keeps its Python objects until the process ends.
  static const TensorReader& get() {
    static const TensorReader* reader = new TensorReader();
    return *reader;
  }

  // False when the kernels cannot read `tensor` where it is: not on the CPU, no storage of its own,
  // or more than kMaxDims dimensions. Throws what torch throws.
  bool read(PyObject* tensor, TensorView& view) const {
    if (borrow(tensor, view)) return true;
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

  // The address and layout of `tensor`, on any device; false when only its Python attributes can
  // tell, as for subclasses. What `found` points to belongs to the tensor.
  bool look(PyObject* tensor, dlpack::Tensor& found) const {
    if (borrow_ == nullptr || !is_plain(tensor)) return false;
    if (borrow_(tensor, &found) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // The attributes of a subclass may disagree with its storage.
  bool is_plain(PyObject* tensor) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    return type == tensor_ || type == parameter_;
  }

 private:
  TensorReader() {
    const pybind11::module_ torch = pybind11::module_::import("torch");
    const char* names[] = {"float32", "float64", "int32", "int64", "float16", "bfloat16", "uint8"};
    for (int i = 0; i < kDtypes; ++i)
      dtypes_[i] = pybind11::object(torch.attr(names[i])).release().ptr();
    tensor_ = pybind11::object(torch.attr("Tensor")).release().ptr();
    parameter_ = pybind11::object(torch.attr("nn").attr("Parameter")).release().ptr();
    if (const auto* api = exchange()) borrow_ = api->borrow;
    is_cpu_ = PyUnicode_InternFromString("is_cpu");
    shape_ = PyUnicode_InternFromString("shape");
    stride_ = PyUnicode_InternFromString("stride");
    dtype_ = PyUnicode_InternFromString("dtype");
    data_ptr_ = PyUnicode_InternFromString("data_ptr");
  }

  // torch's exchange table of DLPack 1.x; null where it has none.
  const dlpack::ExchangeApi* exchange() const {
    constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
    if (PyObject_HasAttrString(tensor_, kAttribute) == 0) return nullptr;
    const pybind11::object capsule = take(PyObject_GetAttrString(tensor_, kAttribute));
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api") == 0) return nullptr;
    const auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->major != 1) api = api->previous;
    return api;
  }

  // False when DLPack cannot tell; the attributes then say why.
  bool borrow(PyObject* tensor, TensorView& view) const {
    dlpack::Tensor found;
    if (!look(tensor, found)) return false;
    if (found.device_type != dlpack::kCpu || found.dims > TensorView::kMaxDims) return false;
    view.data = static_cast<char*>(found.data) + found.byte_offset;
    view.dtype = dtype(found);
    view.dims = found.dims;
    for (int d = 0; d < view.dims; ++d) {
      view.size[d] = found.shape[d];
      view.stride[d] = found.strides[d];
    }
    return found.data != nullptr || view.numel() == 0;
  }

  static Dtype dtype(const dlpack::Tensor& tensor) {
    if (tensor.lanes != 1) return Dtype::other;
    switch (tensor.code) {
      case dlpack::kFloat:
        if (tensor.bits == 32) return Dtype::float32;
        if (tensor.bits == 16) return Dtype::float16;
        return tensor.bits == 64 ? Dtype::float64 : Dtype::other;
      case dlpack::kInt:
        if (tensor.bits == 64) return Dtype::int64;
        return tensor.bits == 32 ? Dtype::int32 : Dtype::other;
      case dlpack::kBfloat:
        return tensor.bits == 16 ? Dtype::bfloat16 : Dtype::other;
      case dlpack::kUInt:
        return tensor.bits == 8 ? Dtype::uint8 : Dtype::other;
      default:
        return Dtype::other;
    }
  }

  static pybind11::object take(PyObject* object) {
    if (object == nullptr) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(object);
  }

  static bool truth(PyObject* object) { return take(object).ptr() == Py_True; }

  Dtype dtype(PyObject* tensor) const {
    const pybind11::object found = take(PyObject_GetAttr(tensor, dtype_));
    for (int i = 0; i < kDtypes; ++i)
      if (found.ptr() == dtypes_[i]) return static_cast<Dtype>(i);
    return Dtype::other;
  }

  static constexpr int kDtypes = static_cast<int>(Dtype::other);
  int (*borrow_)(void*, dlpack::Tensor*) = nullptr;
  PyObject* dtypes_[kDtypes];
  PyObject *tensor_, *parameter_;
  PyObject *is_cpu_, *shape_, *stride_, *dtype_, *data_ptr_;
};

}  // namespace recast
