// Whether dicts were written to, without looking into them: a replay depends on hundreds of dicts
// of modules and optimizers, which hardly ever change. From Python 3.12 on, the interpreter tells
// of every write; before, each dict has a number that changes with every write.
// runtime/recorded/state/same.py compares the contents instead where this is missing.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace recast {

#if PY_VERSION_HEX >= 0x030C0000

// Dicts are not kept alive here: these objects would hide cycles from the garbage collector. A dict
// that dies counts as written to, and is forgotten.
class WatchedDicts {
 public:
  explicit WatchedDicts(const pybind11::list& dicts) : usable_(watcher() >= 0) {
    try {
      for (Py_ssize_t k = 0; usable_ && k < PyList_GET_SIZE(dicts.ptr()); ++k)
        watch(PyList_GET_ITEM(dicts.ptr(), k));
    } catch (...) {
      forget();  // no destructor runs after a constructor that throws
      throw;
    }
  }

  WatchedDicts(const WatchedDicts&) = delete;
  WatchedDicts& operator=(const WatchedDicts&) = delete;
  ~WatchedDicts() { forget(); }

  // False where the interpreter cannot tell.
  bool usable() const { return usable_; }

  // Whether none of them was written to since this was made, or since `renew`.
  bool unwritten(const pybind11::list&) const { return usable_ && !written_ && !died_; }

  void renew(const pybind11::list&) { written_ = false; }

 private:
  using Watching = std::unordered_map<PyObject*, std::vector<WatchedDicts*>>;

  static Watching& watching() {
    static auto* all = new Watching();  // dicts die after all static objects
    return *all;
  }

  static int watcher() {
    static const int number = made_watcher();
    return number;
  }

  // Negative if there is none.
  static int made_watcher() {
    // 3.13.0 does not tell of attributes that are set (python/cpython issue 125608).
    if (Py_Version >> 8 == 0x030D00) return -1;
    const int number = PyDict_AddWatcher(&event);
    if (number < 0) PyErr_Clear();  // the interpreter has eight of them
    return number;
  }

  static int event(PyDict_WatchEvent what, PyObject* dict, PyObject*, PyObject*) {
    const auto found = watching().find(dict);
    if (found == watching().end()) return 0;
    for (WatchedDicts* each : found->second) {
      each->written_ = true;
      each->died_ = each->died_ || what == PyDict_EVENT_DEALLOCATED;
    }
    if (what == PyDict_EVENT_DEALLOCATED) watching().erase(found);
    return 0;
  }

  void watch(PyObject* dict) {
    if (PyDict_Check(dict) == 0) throw pybind11::type_error("WatchedDicts: not a dict");
    if (PyDict_Watch(watcher(), dict) != 0) throw pybind11::error_already_set();
    dicts_.push_back(dict);
    watching()[dict].push_back(this);
  }

  void forget() {
    for (PyObject* dict : dicts_) {
      const auto found = watching().find(dict);
      if (found == watching().end()) continue;
      std::vector<WatchedDicts*>& by = found->second;
      size_t left = 0;
      for (WatchedDicts* each : by)
        if (each != this) by[left++] = each;
      by.resize(left);
      if (!by.empty()) continue;
      watching().erase(found);
      if (PyDict_Unwatch(watcher(), dict) != 0) PyErr_Clear();  // the interpreter is going down
    }
  }

  bool usable_ = false, written_ = false, died_ = false;
  std::vector<PyObject*> dicts_;
};

#else

class WatchedDicts {
 public:
  explicit WatchedDicts(const pybind11::list& dicts) { renew(dicts); }

  bool usable() const { return true; }

  bool unwritten(const pybind11::list& dicts) const {
    const size_t count = PyList_GET_SIZE(dicts.ptr());
    if (count != numbers_.size()) return false;
    for (size_t k = 0; k < count; ++k)
      if (number(PyList_GET_ITEM(dicts.ptr(), k)) != numbers_[k]) return false;
    return true;
  }

  void renew(const pybind11::list& dicts) {
    numbers_.clear();
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(dicts.ptr()); ++k)
      numbers_.push_back(number(PyList_GET_ITEM(dicts.ptr(), k)));
  }

 private:
  // No two dicts ever have the same, so that another dict in a place is noticed too.
  static uint64_t number(PyObject* dict) {
    if (PyDict_Check(dict) == 0) throw pybind11::type_error("WatchedDicts: not a dict");
    return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
  }

  std::vector<uint64_t> numbers_;
};

#endif

}  // namespace recast
