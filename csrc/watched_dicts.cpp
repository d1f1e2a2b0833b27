#include "watched_dicts.h"

namespace py = pybind11;
using recast::WatchedDicts;

void bind_watched_dicts(py::module_& module) {
  py::class_<WatchedDicts>(module, "WatchedDicts", "Whether dicts were written to.")
      .def(py::init<const py::list&>(), py::arg("dicts"))
      .def_property_readonly("usable", &WatchedDicts::usable)
      .def("unwritten", &WatchedDicts::unwritten, py::arg("dicts"),
           "Whether dicts, the same list as ever, were not written to since they were watched.")
      .def("renew", &WatchedDicts::renew, py::arg("dicts"), "From now on.");
}
