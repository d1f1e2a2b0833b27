// Attributes of many objects of few classes, mostly of tensors, read or set in one call each.

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace py = pybind11;

namespace {

// Attributes by name. Those that are written in C, as torch's are, are called directly: to find
// them anew for each object takes as long as to read them.
class Attributes {
 public:
  explicit Attributes(std::vector<PyObject*> names)
      : names_(std::move(names)), found_(names_.size()) {}

  // A new reference; throws what reading it raises.
  PyObject* get(PyObject* object, size_t k) {
    const PyGetSetDef* found = of(object, k);
    PyObject* value = found != nullptr && found->get != nullptr
                          ? found->get(object, found->closure)
                          : PyObject_GetAttr(object, names_[k]);
    if (value == nullptr) throw py::error_already_set();
    return value;
  }

  void set(PyObject* object, size_t k, PyObject* value) {
    const PyGetSetDef* found = of(object, k);
    const int failed = found != nullptr && found->set != nullptr
                           ? found->set(object, value, found->closure)
                           : PyObject_SetAttr(object, names_[k], value);
    if (failed != 0) throw py::error_already_set();
  }

 private:
  const PyGetSetDef* of(PyObject* object, size_t k) {
    if (Py_TYPE(object) != type_) look(Py_TYPE(object));
    return found_[k];
  }

  void look(PyTypeObject* type) {
    const bool plain = type->tp_getattro == PyObject_GenericGetAttr &&
                       type->tp_setattro == PyObject_GenericSetAttr;
    for (size_t k = 0; k < names_.size(); ++k) {
      PyObject* held = plain ? _PyType_Lookup(type, names_[k]) : nullptr;
      found_[k] = nullptr;
      if (held == nullptr || !Py_IS_TYPE(held, &PyGetSetDescr_Type)) continue;
      if (PyType_IsSubtype(type, PyDescr_TYPE(held)) != 0)
        found_[k] = reinterpret_cast<PyGetSetDescrObject*>(held)->d_getset;
    }
    type_ = type;
  }

  std::vector<PyObject*> names_;
  std::vector<const PyGetSetDef*> found_;  // in the present type; null: to be asked for by name
  PyTypeObject* type_ = nullptr;           // of the last object
};

// An item of a list, kept while it is asked: properties may run code that changes the list, so the
// list's length is read each time too.
class Item {
 public:
  Item(const py::list& list, Py_ssize_t k) : held_(PyList_GET_ITEM(list.ptr(), k)) {
    Py_INCREF(held_);
  }
  Item(const Item&) = delete;
  Item& operator=(const Item&) = delete;
  ~Item() { Py_DECREF(held_); }

  operator PyObject*() const { return held_; }

 private:
  PyObject* held_;
};

std::vector<PyObject*> items(const py::tuple& names) {
  std::vector<PyObject*> found;
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names.ptr()); ++k)
    found.push_back(PyTuple_GET_ITEM(names.ptr(), k));
  return found;
}

bool same_attributes(const py::list& objects, const py::tuple& names, const py::list& known) {
  Attributes attributes(items(names));
  const Py_ssize_t count = PyTuple_GET_SIZE(names.ptr());
  Py_ssize_t at = 0;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(objects.ptr()); ++k) {
    const Item object(objects, k);
    for (Py_ssize_t n = 0; n < count; ++n, ++at) {
      PyObject* now = attributes.get(object, n);
      const bool same =
          at < PyList_GET_SIZE(known.ptr()) && now == PyList_GET_ITEM(known.ptr(), at);
      Py_DECREF(now);
      if (!same) return false;
    }
  }
  return at == PyList_GET_SIZE(known.ptr());
}

void set_attributes(const py::list& objects, const py::str& name, const py::list& values) {
  Attributes attributes({name.ptr()});
  if (PyList_GET_SIZE(objects.ptr()) != PyList_GET_SIZE(values.ptr()))
    throw py::value_error("set_attributes: lists of different lengths");
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(objects.ptr()); ++k) {
    if (k == PyList_GET_SIZE(values.ptr())) throw py::value_error("set_attributes: a list shrank");
    const Item object(objects, k), value(values, k);
    attributes.set(object, 0, value);
  }
}

// Whole numbers that objects have, such as versions of tensors.
class Numbers {
 public:
  Numbers(const py::list& objects, py::str name) : name_(std::move(name)) { renew(objects); }

  bool are_of(const py::list& objects) const {
    read(objects, spare_);
    return spare_ == known_;
  }

  void renew(const py::list& objects) { read(objects, known_); }

 private:
  void read(const py::list& objects, std::vector<int64_t>& found) const {
    Attributes attributes({name_.ptr()});
    found.clear();
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(objects.ptr()); ++k) {
      const Item object(objects, k);
      PyObject* now = attributes.get(object, 0);
      found.push_back(PyLong_AsLongLong(now));
      Py_DECREF(now);
      if (found.back() == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    }
  }

  py::str name_;
  std::vector<int64_t> known_;
  mutable std::vector<int64_t> spare_;  // used under the GIL
};

// Whether each object's attributes are one object alone, under whatever name.
bool have_only(const py::list& objects, const py::list& known) {
  const Py_ssize_t count = PyList_GET_SIZE(objects.ptr());
  if (count != PyList_GET_SIZE(known.ptr())) return false;
  for (Py_ssize_t k = 0; k < count; ++k) {
    PyObject* held = PyObject_GenericGetDict(PyList_GET_ITEM(objects.ptr(), k), nullptr);
    if (held == nullptr) throw py::error_already_set();
    Py_ssize_t place = 0;
    PyObject *key = nullptr, *value = nullptr;
    const bool same = PyDict_GET_SIZE(held) == 1 && PyDict_Next(held, &place, &key, &value) != 0 &&
                      value == PyList_GET_ITEM(known.ptr(), k);
    Py_DECREF(held);
    if (!same) return false;
  }
  return true;
}

// `objects`: any sequence.
bool same_objects(const py::object& objects, const py::list& known) {
  PyObject* fast = PySequence_Fast(objects.ptr(), "same_objects: not a sequence");
  if (fast == nullptr) throw py::error_already_set();
  const py::object held = py::reinterpret_steal<py::object>(fast);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast);
  if (count != PyList_GET_SIZE(known.ptr())) return false;
  for (Py_ssize_t k = 0; k < count; ++k)
    if (PySequence_Fast_GET_ITEM(fast, k) != PyList_GET_ITEM(known.ptr(), k)) return false;
  return true;
}

// Whether there are as many references to each object as to the first.
bool same_reference_counts(const py::list& objects) {
  for (Py_ssize_t k = 1; k < PyList_GET_SIZE(objects.ptr()); ++k)
    if (Py_REFCNT(PyList_GET_ITEM(objects.ptr(), k)) !=
        Py_REFCNT(PyList_GET_ITEM(objects.ptr(), 0)))
      return false;
  return true;
}

// How many references to objects there are.
class ReferenceCounts {
 public:
  explicit ReferenceCounts(const py::list& objects) {
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(objects.ptr()); ++k)
      known_.push_back(Py_REFCNT(PyList_GET_ITEM(objects.ptr(), k)));
  }

  bool are_of(const py::list& objects) const {
    const size_t count = PyList_GET_SIZE(objects.ptr());
    if (count != known_.size()) return false;
    for (size_t k = 0; k < count; ++k)
      if (Py_REFCNT(PyList_GET_ITEM(objects.ptr(), k)) != known_[k]) return false;
    return true;
  }

 private:
  std::vector<Py_ssize_t> known_;
};

}  // namespace

void bind_tensor_attributes(py::module_& module) {
  module.def("same_attributes", &same_attributes, py::arg("objects"), py::arg("names"),
             py::arg("known"), "Whether the attributes of objects are the very objects known.");
  module.def("set_attributes", &set_attributes, py::arg("objects"), py::arg("name"),
             py::arg("values"), "Set an attribute of each object.");
  module.def("have_only", &have_only, py::arg("objects"), py::arg("known"),
             "Whether each object has the one known attribute, and no others.");
  module.def("same_objects", &same_objects, py::arg("objects"), py::arg("known"),
             "Whether these are the very objects known.");
  module.def("same_reference_counts", &same_reference_counts, py::arg("objects"),
             "Whether each object has as many references as the first.");
  py::class_<Numbers>(module, "Numbers", "A whole number that each of many objects has.")
      .def(py::init<const py::list&, py::str>(), py::arg("objects"), py::arg("name"))
      .def("are_of", &Numbers::are_of, py::arg("objects"), "Whether they are these now.")
      .def("renew", &Numbers::renew, py::arg("objects"));
  py::class_<ReferenceCounts>(module, "ReferenceCounts", "How many references objects have.")
      .def(py::init<const py::list&>(), py::arg("objects"))
      .def("are_of", &ReferenceCounts::are_of, py::arg("objects"), "Whether they have as many.");
}
