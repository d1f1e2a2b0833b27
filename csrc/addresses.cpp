// Reads the addresses of many tensors, on any device, in one call from Python.

#include <pybind11/pybind11.h>

#include <cstdint>

#include "tensor.h"

namespace py = pybind11;

namespace {

// Writes the address of tensor k to word k * step of `words`, a contiguous buffer of 8-byte
// elements; false when the address of any tensor cannot be read.
bool put_addresses(const py::list& tensors, const py::buffer& words, Py_ssize_t step) {
  Py_buffer view;
  if (PyObject_GetBuffer(words.ptr(), &view, PyBUF_WRITABLE) != 0) throw py::error_already_set();
  const Py_ssize_t count = PyList_GET_SIZE(tensors.ptr());
  const bool fits = step > 0 && (count == 0 || ((count - 1) * step + 1) * 8 <= view.len);
  bool told = fits;
  auto* to = static_cast<int64_t*>(view.buf);
  const recast::TensorReader& reader = recast::TensorReader::get();
  for (Py_ssize_t k = 0; told && k < count; ++k) {
    recast::dlpack::Tensor found;
    told = reader.look(PyList_GET_ITEM(tensors.ptr(), k), found);
    if (told)
      to[k * step] =
          reinterpret_cast<int64_t>(found.data) + static_cast<int64_t>(found.byte_offset);
  }
  PyBuffer_Release(&view);
  if (!fits) throw py::value_error("put_addresses: more tensors than words");
  return told;
}

}  // namespace

void bind_addresses(py::module_& module) {
  module.def(
      "put_addresses", &put_addresses, py::arg("tensors"), py::arg("words"), py::arg("step"),
      "Write the addresses of tensors to every step-th of words; whether that was possible.");
}
