// Python bindings of the id table. The caller ensures that tensors of ids are flat and int64.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "id_table.h"
#include "tensor.h"

namespace py = pybind11;
using recast::Dtype;
using recast::TensorReader;
using recast::TensorView;
using recast::ids::Evict;
using recast::ids::IdTable;
using recast::ids::Settings;

namespace {

Evict parse(const std::string& name) {
  if (name == "never") return Evict::never;
  if (name == "lru") return Evict::lru;
  if (name == "lfu") return Evict::lfu;
  if (name == "epoch_lru") return Evict::epoch_lru;
  if (name == "epoch_lfu") return Evict::epoch_lfu;
  if (name == "given") return Evict::given;
  throw py::value_error("unknown eviction '" + name + "'");
}

struct Flat {
  int64_t* data;
  int64_t size;
};

Flat flat(const py::handle& tensor) {
  TensorView view;
  const bool readable = TensorReader::get().read(tensor.ptr(), view);
  if (!readable || view.dtype != Dtype::int64 || view.dims != 1 ||
      (view.size[0] > 1 && view.stride[0] != 1))
    throw py::value_error("ids and rows are contiguous int64 tensors of one dimension on the CPU");
  return {reinterpret_cast<int64_t*>(view.data), view.size[0]};
}

Flat of_size(const py::handle& tensor, int64_t size) {
  const Flat found = flat(tensor);
  if (found.size != size) throw py::value_error("tensors of different sizes");
  return found;
}

void find(const IdTable& table, const py::object& ids, const py::object& rows, int threads) {
  const Flat from = flat(ids), to = of_size(rows, from.size);
  py::gil_scoped_release release;
  table.find(from.data, from.size, to.data, threads);
}

// None, or the id that found no row and whether it was to be a guest.
py::object find_or_insert(IdTable& table, const py::object& ids, const py::object& scores,
                          const py::object& rows, int threads) {
  const Flat from = flat(ids), to = of_size(rows, from.size);
  const int64_t* given = scores.is_none() ? nullptr : of_size(scores, from.size).data;
  try {
    py::gil_scoped_release release;
    table.find_or_insert(from.data, from.size, given, to.data, threads);
  } catch (const recast::ids::Full& full) {
    return py::make_tuple(full.id, full.guests);
  }
  return py::none();
}

// (ids, rows) as tensors; `empty(size)` allocates one.
py::object pairs(const std::vector<IdTable::Given>& given, const py::object& empty) {
  const auto n = static_cast<int64_t>(given.size());
  py::object ids = empty(n), rows = empty(n);
  const Flat to_ids = flat(ids), to_rows = flat(rows);
  for (int64_t i = 0; i < n; ++i) to_ids.data[i] = given[i].id, to_rows.data[i] = given[i].row;
  return py::make_tuple(ids, rows);
}

py::object column(const std::vector<int64_t>& numbers, const py::object& empty) {
  py::object tensor = empty(static_cast<int64_t>(numbers.size()));
  const Flat to = flat(tensor);
  std::copy(numbers.begin(), numbers.end(), to.data);
  return tensor;
}

py::object columns(const IdTable::Stored& stored, const py::object& empty) {
  return py::make_tuple(column(stored.ids, empty), column(stored.rows, empty),
                        column(stored.scores, empty), column(stored.stamps, empty));
}

py::dict counters(const IdTable& table) {
  const auto c = table.counters();
  py::dict out;
  out["inserted"] = c.inserted;
  out["evicted"] = c.evicted;
  out["expired"] = c.expired;
  out["refused"] = c.refused;
  out["hits"] = c.hits;
  out["misses"] = c.misses;
  return out;
}

}  // namespace

void bind_id_table(py::module_& m) {
  py::class_<IdTable>(m, "IdTable")
      .def(py::init([](int64_t capacity, int64_t guests, const std::string& evict, int64_t admit,
                       int64_t ttl) {
             return new IdTable(Settings{capacity, guests, parse(evict), admit, ttl});
           }),
           py::arg("capacity"), py::arg("guests"), py::arg("evict"), py::arg("admit"),
           py::arg("ttl"))
      .def("copy", [](const IdTable& table) { return new IdTable(table); })
      .def("find", &find)
      .def("find_or_insert", &find_or_insert)
      .def("take_fresh",
           [](IdTable& table, const py::object& empty) { return pairs(table.take_fresh(), empty); })
      .def("take_gone",
           [](IdTable& table, const py::object& empty) { return pairs(table.take_gone(), empty); })
      .def("advance", &IdTable::advance, py::call_guard<py::gil_scoped_release>())
      .def("erase",
           [](IdTable& table, const py::object& ids) {
             const Flat from = flat(ids);
             return table.erase(from.data, from.size);
           })
      .def("stored", [](const IdTable& table, int64_t since,
                        const py::object& empty) { return columns(table.stored(since), empty); })
      .def("load",
           [](IdTable& table, const py::object& ids, const py::object& rows,
              const py::object& scores, const py::object& stamps) {
             const Flat from = flat(ids);
             table.load(from.data, of_size(rows, from.size).data, of_size(scores, from.size).data,
                        of_size(stamps, from.size).data, from.size);
           })
      .def("give_up", [](IdTable& table, int64_t n,
                         const py::object& empty) { return columns(table.give_up(n), empty); })
      .def("take_back",
           [](IdTable& table, const py::object& ids, const py::object& scores,
              const py::object& rows) {
             const Flat from = flat(ids), to = of_size(rows, from.size);
             table.take_back(from.data, of_size(scores, from.size).data, from.size, to.data);
           })
      .def("pin",
           [](IdTable& table, const py::object& rows) {
             const Flat from = flat(rows);
             table.pin(from.data, from.size);
           })
      .def("candidates",
           [](const IdTable& table, const py::object& empty) {
             const auto found = table.candidates();
             return py::make_tuple(column(found.ids, empty), column(found.scores, empty),
                                   column(found.stamps, empty));
           })
      .def("load_candidates",
           [](IdTable& table, const py::object& ids, const py::object& counts,
              const py::object& stamps) {
             const Flat from = flat(ids);
             table.load_candidates(from.data, of_size(counts, from.size).data,
                                   of_size(stamps, from.size).data, from.size);
           })
      .def("counters", &counters)
      .def("__len__", &IdTable::size)
      .def("guests", &IdTable::guests)
      .def("bytes", &IdTable::bytes)
      .def_property("step", &IdTable::step, &IdTable::set_step)
      .def_property("looked_up", &IdTable::looked_up, &IdTable::set_looked_up)
      .def_property("epoch", &IdTable::epoch, &IdTable::set_epoch);
}
