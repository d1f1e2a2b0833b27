// Whether dicts hold the objects that they held before.
#pragma once

#include <pybind11/pybind11.h>

namespace recast {

// `absent` stands for a missing key. Values are compared by identity: an equal value that is
// another object is not the same. The lists are of one length; throws for what is no dict.
inline bool same_items(const pybind11::list& dicts, const pybind11::list& keys,
                       const pybind11::list& known, const pybind11::object& absent) {
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(dicts.ptr()); ++k) {
    PyObject* dict = PyList_GET_ITEM(dicts.ptr(), k);
    if (PyDict_Check(dict) == 0) throw pybind11::type_error("same_items: not a dict");
    PyObject* now = PyDict_GetItemWithError(dict, PyList_GET_ITEM(keys.ptr(), k));
    if (now == nullptr) {
      if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
      now = absent.ptr();
    }
    if (now != PyList_GET_ITEM(known.ptr(), k)) return false;
  }
  return true;
}

}  // namespace recast
