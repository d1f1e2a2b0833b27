// Whether a call is one of those that were examined already: arguments of a known form, and modules
// that nothing was written to since. What is looked up in Python at each call leaves the caches of
// the processor between calls, and then takes four times as long as in a loop; this is one call.
// rewriter/compiled/known_calls.py says what it is for.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "same_items.h"
#include "tensor.h"
#include "watched_dicts.h"

namespace py = pybind11;

namespace {

using recast::TensorReader;

// One argument: a tensor, a container of tensors alone, or None, or a container of those; or a
// number or text.
struct Part {
  enum class Kind { tensor, none, constant, tuple, list, dict } kind = Kind::tensor;
  bool nones = false;  // the container holds nothing else
  Py_ssize_t count = 0;
  py::tuple keys;    // of a dict
  py::object value;  // of a constant
};

// What a graph takes for granted of the modules.
struct Modules {
  explicit Modules(const py::tuple& all)
      : watched(all[0]),
        empty(all[1]),
        dicts(all[2]),
        keys(all[3]),
        values(all[4]),
        absent(all[5]),
        sized(all[6]),
        functions(all[7]),
        objects(all[8]) {}

  // Whether each dict has the very object under its key, or is empty, or of its size.
  bool entries_stand() const {
    for (const py::handle one : empty)
      if (PyDict_GET_SIZE(one.ptr()) != 0) return false;
    for (const py::handle one : sized)
      if (PyDict_GET_SIZE(PyTuple_GET_ITEM(one.ptr(), 0)) !=
          PyLong_AsSsize_t(PyTuple_GET_ITEM(one.ptr(), 1)))
        return false;
    return recast::same_items(dicts, keys, values, absent);
  }

  // Whether `ask(*of)` is the same function, with the same code and defaults.
  bool functions_stand() const {
    for (const py::handle one : functions) {
      const auto item = [&](Py_ssize_t k) { return PyTuple_GET_ITEM(one.ptr(), k); };
      const auto found = py::reinterpret_steal<py::object>(PyObject_CallObject(item(0), item(1)));
      if (!found) throw py::error_already_set();
      PyObject* inner = item(3);
      if (found.ptr() != item(2) || PyFunction_GetCode(inner) != item(4)) return false;
      if (or_none(PyFunction_GetDefaults(inner)) != item(5)) return false;
      if (or_none(PyFunction_GetKwDefaults(inner)) != item(6)) return false;
    }
    return true;
  }

  static PyObject* or_none(PyObject* value) { return value == nullptr ? Py_None : value; }

  py::list watched;  // all dicts below
  py::list empty;
  py::list dicts, keys, values;  // of equal lengths; `absent` is the value where there is no entry
  py::object absent;
  py::list sized;      // (dict, size)
  py::list functions;  // (ask, of, function, its inner one, code, defaults, keyword defaults)
  py::list objects;    // of the classes that they had
};

constexpr uint8_t kComplex = 5;  // DLPack's number
constexpr size_t kMostForms = 64;
constexpr int64_t kDeclined = -1;

class KnownCalls {
 public:
  // `form`: rewriter/compiled/trees.py, Outline. `lazy`: the flat inputs that torch may have yet to
  // negate. `dicts`: all that `modules` below names.
  KnownCalls(const py::object& form, std::vector<size_t> lazy, const py::list& dicts)
      : lazy_(std::move(lazy)), dicts_(dicts) {
    usable_ = dicts_.usable() && py::isinstance<py::list>(form);
    if (!usable_) return;
    for (const py::handle one : form) {
      Part part;
      usable_ = usable_ && read(one, part);
      parts_.push_back(part);
    }
  }

  // The flat inputs of the graph; None if the call has to be examined. `modules`: what Modules
  // reads, passed at each call, since it would hide cycles from the garbage collector here.
  py::object inputs(const py::tuple& args, const py::tuple& modules) {
    std::vector<PyObject*> leaves;
    if (usable_ && holds_ && stand(Modules(modules)) && flatten(args, leaves) && known(leaves)) {
      py::list found(leaves.size());
      for (size_t k = 0; k < leaves.size(); ++k)
        found[k] = py::reinterpret_borrow<py::object>(leaves[k]);
      if (!is_lazy(found)) {
        misses_ = 0;
        return std::move(found);
      }
    }
    ++misses_;
    return py::none();
  }

  // Called before a call is examined: the number of the examination. Declined mostly if calls are
  // hardly ever known.
  int64_t examine(const py::tuple& modules) {
    if (!usable_ || (misses_ > kMostForms && (misses_ & (misses_ - 1)) != 0)) return kDeclined;
    const Modules now(modules);
    if (!holds_ || !stand(now)) {
      holds_ = false;
      forms_.clear();
      dicts_.renew(now.watched);
      types_.clear();
      for (const py::handle object : now.objects) types_.push_back(Py_TYPE(object.ptr()));
      ++examination_;
    }
    return examination_;
  }

  // The call that was examined runs by its graph. If another thread has begun anew since, that one
  // may have seen a change that this one has not.
  void admit(int64_t examination, const py::tuple& args) {
    std::vector<PyObject*> leaves;
    std::vector<int64_t> words;
    if (examination != examination_ || !flatten(args, leaves) || !describe(leaves, words)) return;
    holds_ = true;
    if (std::find(forms_.begin(), forms_.end(), words) != forms_.end()) return;
    if (forms_.size() < kMostForms) {
      forms_.push_back(std::move(words));
    } else {
      forms_[next_++ % kMostForms] = std::move(words);
    }
  }

 private:
  static bool read(const py::handle one, Part& part) {
    if (one.is_none()) return true;
    const auto pair = py::cast<py::tuple>(one);
    py::object kind = pair[0], form = pair[1];
    if (kind.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(Py_None))) {
      if (form.is_none()) {
        part.kind = Part::Kind::none;
        return true;
      }
      part.nones = true;
      const auto inner = py::cast<py::tuple>(form);
      kind = inner[0];
      form = inner[1];
    }
    if (kind.ptr() == reinterpret_cast<PyObject*>(&PyDict_Type)) {
      part.kind = Part::Kind::dict;
      part.keys = py::cast<py::tuple>(form);
      part.count = PyTuple_GET_SIZE(part.keys.ptr());
      for (const py::handle key : part.keys)
        if (PyUnicode_CheckExact(key.ptr()) == 0) return false;  // to compare it may run any code
      return true;
    }
    if (is_constant(kind.ptr())) {
      part.kind = Part::Kind::constant;
      part.value = form;
      return true;
    }
    const bool tuple = kind.ptr() == reinterpret_cast<PyObject*>(&PyTuple_Type);
    part.kind = tuple ? Part::Kind::tuple : Part::Kind::list;
    part.count = py::cast<Py_ssize_t>(form);
    return tuple || kind.ptr() == reinterpret_cast<PyObject*>(&PyList_Type);
  }

  // Whether to compare two of this class runs no code of the user's.
  static bool is_constant(const PyObject* kind) {
    for (const PyTypeObject* one : {&PyBool_Type, &PyLong_Type, &PyFloat_Type, &PyUnicode_Type})
      if (kind == reinterpret_cast<const PyObject*>(one)) return true;
    return false;
  }

  // Fills `leaves`, borrowed; false if the arguments have another form.
  bool flatten(const py::tuple& args, std::vector<PyObject*>& leaves) const {
    const auto count = static_cast<Py_ssize_t>(parts_.size());
    if (PyTuple_GET_SIZE(args.ptr()) != count) return false;
    for (Py_ssize_t k = 0; k < count; ++k)
      if (!take(PyTuple_GET_ITEM(args.ptr(), k), parts_[static_cast<size_t>(k)], leaves))
        return false;
    return true;
  }

  static bool take(PyObject* value, const Part& part, std::vector<PyObject*>& leaves) {
    switch (part.kind) {
      case Part::Kind::tensor:
        leaves.push_back(value);
        return true;
      case Part::Kind::none:
        return value == Py_None;
      case Part::Kind::constant:
        return Py_TYPE(value) == Py_TYPE(part.value.ptr()) &&
               PyObject_RichCompareBool(value, part.value.ptr(), Py_EQ) == 1;
      case Part::Kind::tuple:
        return PyTuple_CheckExact(value) != 0 && PyTuple_GET_SIZE(value) == part.count &&
               items(&PyTuple_GET_ITEM(value, 0), part, leaves);
      case Part::Kind::list:
        return PyList_CheckExact(value) != 0 && PyList_GET_SIZE(value) == part.count &&
               items(reinterpret_cast<PyListObject*>(value)->ob_item, part, leaves);
      case Part::Kind::dict:
        return PyDict_CheckExact(value) != 0 && PyDict_GET_SIZE(value) == part.count &&
               entries(value, part, leaves);
    }
    return false;
  }

  static bool items(PyObject* const* first, const Part& part, std::vector<PyObject*>& leaves) {
    for (Py_ssize_t k = 0; k < part.count; ++k) {
      if (part.nones && first[k] != Py_None) return false;
      if (!part.nones) leaves.push_back(first[k]);
    }
    return true;
  }

  static bool entries(PyObject* dict, const Part& part, std::vector<PyObject*>& leaves) {
    Py_ssize_t place = 0, at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict, &place, &key, &value) != 0) {
      PyObject* then = PyTuple_GET_ITEM(part.keys.ptr(), at++);
      if (key != then && (PyUnicode_CheckExact(key) == 0 || PyUnicode_Compare(key, then) != 0))
        return false;
      leaves.push_back(value);
    }
    return true;
  }

  // The dtype, device and shape of each tensor; false if one is of a subclass, or has other facts.
  static bool describe(const std::vector<PyObject*>& leaves, std::vector<int64_t>& words) {
    const TensorReader& reader = TensorReader::get();
    for (PyObject* leaf : leaves) {
      recast::dlpack::Tensor found;
      if (!reader.look(leaf, found) || found.code == kComplex) return false;
      words.push_back(static_cast<int64_t>(found.code) << 48 | int64_t{found.bits} << 40 |
                      int64_t{found.lanes} << 24 | found.dims);
      words.push_back(int64_t{found.device_type} << 32 | found.device_id);
      for (int32_t d = 0; d < found.dims; ++d) words.push_back(found.shape[d]);
    }
    return true;
  }

  bool known(const std::vector<PyObject*>& leaves) const {
    std::vector<int64_t> words;
    return describe(leaves, words) &&
           std::find(forms_.begin(), forms_.end(), words) != forms_.end();
  }

  // torch lets other threads run while it answers.
  bool is_lazy(const py::list& leaves) const {
    static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    for (const size_t k : lazy_) {
      PyObject* leaf = k < leaves.size() ? PyList_GET_ITEM(leaves.ptr(), k) : Py_None;
      const auto answer =
          py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(leaf, is_neg));
      if (!answer) throw py::error_already_set();
      if (answer.ptr() != Py_False) return true;
    }
    return false;
  }

  // Whether the modules are as they were when a call was examined.
  bool stand(const Modules& now) {
    if (!have_types(now.objects) || !now.functions_stand()) return false;
    if (dicts_.unwritten(now.watched)) return true;
    dicts_.renew(now.watched);
    holds_ = now.entries_stand();
    return holds_;
  }

  bool have_types(const py::list& objects) const {
    if (static_cast<size_t>(PyList_GET_SIZE(objects.ptr())) != types_.size()) return false;
    for (size_t k = 0; k < types_.size(); ++k)
      if (Py_TYPE(PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(k))) != types_[k])
        return false;
    return true;
  }

  std::vector<Part> parts_;
  std::vector<size_t> lazy_;
  recast::WatchedDicts dicts_;
  std::vector<PyTypeObject*> types_;  // kept alive by the objects, or not the same
  std::vector<std::vector<int64_t>> forms_;
  bool usable_ = false, holds_ = false;
  int64_t examination_ = 0;
  size_t next_ = 0, misses_ = 0;
};

}  // namespace

void bind_known_calls(py::module_& module) {
  py::class_<KnownCalls>(module, "KnownCalls", "Calls of known form on modules as they were.")
      .def(py::init<const py::object&, std::vector<size_t>, const py::list&>(), py::arg("form"),
           py::arg("lazy"), py::arg("dicts"))
      .def("inputs", &KnownCalls::inputs, py::arg("args"), py::arg("modules"),
           "The flat inputs of a known call, or None.")
      .def("examine", &KnownCalls::examine, py::arg("modules"),
           "To be called before a call is examined; what to pass to admit.")
      .def("admit", &KnownCalls::admit, py::arg("examination"), py::arg("args"),
           "From now on, calls of this form are known.");
}
