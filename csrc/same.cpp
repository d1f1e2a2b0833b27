// The checks before a recording is replayed, one call each for a whole model and its optimizer:
// that dicts hold the same objects as before, and that tensors are where they were.
// runtime/recorded/state/same.py does the same in Python, in three times the time.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "same_items.h"
#include "tensor.h"

namespace py = pybind11;

namespace {

using recast::TensorReader;

bool same_values(const py::list& dicts, const py::list& known) {
  const Py_ssize_t most = PyList_GET_SIZE(known.ptr());
  Py_ssize_t at = 0;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(dicts.ptr()); ++k) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), k);
    if (PyDict_Check(dict) == 0) throw py::type_error("same_values: not a dict");
    Py_ssize_t place = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict, &place, &key, &value) != 0)
      if (at == most || value != PyList_GET_ITEM(known.ptr(), at++)) return false;
  }
  return at == most;
}

bool same_items(const py::list& dicts, const py::list& keys, const py::list& known,
                const py::object& absent) {
  const Py_ssize_t count = PyList_GET_SIZE(dicts.ptr());
  if (PyList_GET_SIZE(keys.ptr()) != count || PyList_GET_SIZE(known.ptr()) != count)
    throw py::value_error("same_items: lists of different lengths");
  return recast::same_items(dicts, keys, known, absent);
}

// The addresses, shapes and strides of tensors on any device.
class Places {
 public:
  explicit Places(const py::list& tensors) {
    readable_ = each(tensors, [this](int64_t word) {
      words_.push_back(word);
      return true;
    });
  }

  // Whether all of them could be read.
  bool readable() const { return readable_; }

  // Whether `tensors`, equally many, have these.
  bool are_of(const py::list& tensors) const {
    size_t at = 0;
    const bool same = readable_ && each(tensors, [this, &at](int64_t word) {
                        return at < words_.size() && word == words_[at++];
                      });
    return same && at == words_.size();
  }

 private:
  // Calls `take` with each word that describes them until it is false; false if it was, or if a
  // tensor cannot be read.
  template <class Take>
  static bool each(const py::list& tensors, const Take& take) {
    const TensorReader& reader = TensorReader::get();
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(tensors.ptr()); ++k) {
      recast::dlpack::Tensor found;
      if (!reader.look(PyList_GET_ITEM(tensors.ptr(), k), found)) return false;
      if (!take(reinterpret_cast<int64_t>(found.data) + static_cast<int64_t>(found.byte_offset)) ||
          !take(static_cast<int64_t>(found.code) << 32 | found.bits << 16 | found.dims))
        return false;
      for (int32_t d = 0; d < found.dims; ++d)
        if (!take(found.shape[d]) || !take(found.strides[d])) return false;
    }
    return true;
  }

  bool readable_ = false;
  std::vector<int64_t> words_;
};

}  // namespace

void bind_same(py::module_& module) {
  module.def("same_values", &same_values, py::arg("dicts"), py::arg("known"),
             "Whether the values of dicts, one after the other, are the very objects known.");
  module.def("same_items", &same_items, py::arg("dicts"), py::arg("keys"), py::arg("known"),
             py::arg("absent"), "Whether each dict has the very object known under its key.");
  py::class_<Places>(module, "Places", "Where tensors lie: addresses, dtypes, shapes, strides.")
      .def(py::init<const py::list&>(), py::arg("tensors"))
      .def_property_readonly("readable", &Places::readable)
      .def("are_of", &Places::are_of, py::arg("tensors"));
}
