// How row updates read Python's `Piece` and `Update` objects (runtime/rows/pieces.py, update.py):
// in place, since passing each number as an argument would cost more than using it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "row_update.h"
#include "tensor.h"

namespace recast::rows {

namespace py = pybind11;

// Rows and gradients have 32-bit numbers, one of which means "none".
constexpr int64_t kMost = (int64_t{1} << 32) - 2;

inline py::object take(PyObject* object) {
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

inline int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

inline double number(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// A factor; 1 for None.
inline double factor(const py::object& object) {
  return object.is_none() ? 1.0 : number(object.ptr());
}

// An attribute by its interned name.
class Name {
 public:
  explicit Name(const char* name) : name_(PyUnicode_InternFromString(name)) {}
  py::object of(const py::handle& object) const {
    return take(PyObject_GetAttr(object.ptr(), name_));
  }
  PyObject* text() const { return name_; }

 private:
  PyObject* name_;
};

inline void set(const py::handle& object, const Name& name, const py::handle& value) {
  if (PyObject_SetAttr(object.ptr(), name.text(), value.ptr()) != 0) throw py::error_already_set();
}

struct Names {
  Name ids{"ids"}, rows{"rows"}, offsets{"offsets"}, weights{"weights"}, fixed{"fixed"},
      mean{"mean"}, padding{"padding_idx"}, scale{"scale"}, cell{"cell"}, pieces{"pieces"},
      last{"last"}, awake{"awake"}, fades{"fades"}, betas{"betas"}, lerps{"lerps"}, now{"now"},
      wake{"wake"};
  static const Names& get() {
    static const Names* names = new Names();
    return *names;
  }
};

inline bool read(const py::handle& tensor, TensorView& view) {
  return TensorReader::get().read(tensor.ptr(), view);
}

inline bool is_flat(const TensorView& view) {
  return view.dims == 1 && (view.stride[0] == 1 || view.size[0] <= 1);
}

inline bool are_rows(const TensorView& view, int64_t dim) {
  return view.dims == 2 && view.size[1] == dim && (view.stride[1] == 1 || dim == 1);
}

inline bool is_wide(const TensorView& ints) { return ints.dtype == Dtype::int64; }

inline bool are_indices(const py::handle& tensor, TensorView& view) {
  return read(tensor, view) && is_flat(view) &&
         (view.dtype == Dtype::int64 || view.dtype == Dtype::int32);
}

// The format of a table's 16-bit numbers: there can be only one.
class Formats {
 public:
  // False for a dtype that the kernels do not take together with those added before.
  bool add(Dtype dtype, bool& narrow) {
    narrow = dtype == Dtype::float16 || dtype == Dtype::bfloat16;
    if (!narrow) return dtype == Dtype::float32;
    const Half found = dtype == Dtype::float16 ? Half::fp16 : Half::bf16;
    if (half != Half::none && half != found) return false;
    half = found;
    return true;
  }
  Half half = Half::none;
};

// False when the piece must be simplified first, or cannot be read here at all.
inline bool read_piece(const py::handle& object, int64_t dim, Formats& formats, bool& narrow,
                       Piece& piece) {
  const Names& names = Names::get();
  TensorView ids, rows;
  if (!are_indices(names.ids.of(object), ids)) return false;
  if (!read(names.rows.of(object), rows) || !are_rows(rows, dim)) return false;
  if (!formats.add(rows.dtype, narrow)) return false;
  piece = {};
  piece.ids = ids.data;
  piece.wide_ids = is_wide(ids);
  piece.n_ids = ids.size[0];
  piece.gradient = rows.data;
  piece.stride = rows.stride[0] * (narrow ? 2 : 4);
  piece.n_bags = rows.size[0];
  const py::object offsets = names.offsets.of(object), weights = names.weights.of(object);
  TensorView view;
  if (!offsets.is_none()) {
    if (!are_indices(offsets, view)) return false;
    piece.offsets = view.data;
    piece.wide_offsets = is_wide(view);
    piece.n_offsets = view.size[0];
  }
  if (!weights.is_none()) {
    if (!read(weights, view) || !is_flat(view) || view.dtype != Dtype::float32) return false;
    piece.weights = reinterpret_cast<const float*>(view.data);
  }
  piece.fixed = names.fixed.of(object).cast<int64_t>();
  piece.mean = names.mean.of(object).cast<bool>();
  const py::object padding = names.padding.of(object);
  piece.padding = padding.is_none() ? -1 : padding.cast<int64_t>();
  piece.factor = static_cast<float>(factor(names.scale.of(object)));
  return true;
}

// Appends a table and its pieces; false, having appended nothing, when they cannot be read.
inline bool read_table(const py::list& objects, int64_t rows, int64_t dim, Formats formats,
                       std::vector<Plan::Table>& tables, std::vector<Piece>& pieces) {
  const size_t first = pieces.size();
  int64_t entries = 0;
  bool narrow = false, readable = rows <= kMost;
  for (size_t i = 0; i < objects.size() && readable; ++i) {
    Piece piece;
    bool narrow_piece = false;
    readable = read_piece(objects[i], dim, formats, narrow_piece, piece) &&
               (i == 0 || narrow_piece == narrow);
    narrow = narrow_piece;
    entries += piece.n_ids;
    pieces.push_back(piece);
  }
  if (!readable || entries > kMost) {
    pieces.resize(first);
    return false;
  }
  tables.push_back({rows, dim, first, pieces.size(), formats.half, narrow});
  return true;
}

inline std::unique_ptr<Plan> sort(std::vector<Plan::Table> tables, std::vector<Piece> pieces,
                                  int threads) {
  const py::gil_scoped_release release;
  return std::make_unique<Plan>(std::move(tables), std::move(pieces), threads);
}

// As Python reads it: "3 -7", the table and its bad id, or "3 offsets".
inline py::index_error error_of(size_t table, const BadInput& bad) {
  return py::index_error(std::to_string(table) + " " +
                         (bad.offsets ? "offsets" : std::to_string(bad.id)));
}

inline bool read_action(PyObject* text, Action& action) {
  constexpr std::pair<const char*, Action> kActions[] = {
      {"sgd", Action::sgd},
      {"adagrad", Action::adagrad},
      {"row_wise_adagrad", Action::row_wise_adagrad},
      {"adam", Action::adam},
      {"momentum", Action::momentum},
      {"rmsprop", Action::rmsprop}};
  for (const auto& [name, value] : kActions) {
    if (PyUnicode_CompareWithASCIIString(text, name) != 0) continue;
    action = value;
    return true;
  }
  return false;
}

inline bool has_states(Action action, Py_ssize_t count) {
  switch (action) {
    case Action::sgd:
    case Action::store:
      return count == 0;
    case Action::adagrad:
    case Action::row_wise_adagrad:
      return count == 1;
    case Action::momentum:
      return count <= 1;
    case Action::adam:
      return count == 2;
    case Action::rmsprop:
      return count == 1 || count == 2;
  }
  return false;
}

// Reads where the table and its states are; false when the kernels do not take them.
inline bool read_target(PyObject* table, PyObject* const* states, Py_ssize_t count, Target& to,
                        TensorView& weight, Formats& formats) {
  if (!read(table, weight) || weight.dims != 2 || !are_rows(weight, weight.size[1])) return false;
  if (!formats.add(weight.dtype, to.narrow)) return false;
  to.weight = weight.data;
  to.stride = weight.stride[0];
  if (!has_states(to.action, count)) return false;
  for (Py_ssize_t s = 0; s < count; ++s) {
    TensorView view;
    if (!read(states[s], view)) return false;
    const bool fits =
        to.action == Action::row_wise_adagrad ? view.dims == 1 : are_rows(view, weight.size[1]);
    if (!fits || view.size[0] != weight.size[0]) return false;
    bool narrow = false;
    if (!formats.add(view.dtype, narrow) || (s == 1 && narrow != to.narrow_state)) return false;
    to.narrow_state = narrow;
    (s == 0 ? to.state : to.second) = {view.data, view.stride[0]};
  }
  return true;
}

// The fields of `Update` from lr to ahead, which are those of `Numbers`.
inline void read_numbers(PyObject* const* field, Target& to) {
  to.lr = static_cast<float>(number(field[0]));
  to.eps = static_cast<float>(number(field[1]));
  to.share = static_cast<float>(1.0 - number(PyTuple_GET_ITEM(field[2], 0)));
  to.second_share = static_cast<float>(1.0 - number(PyTuple_GET_ITEM(field[2], 1)));
  to.decay = static_cast<float>(number(field[3]));
  to.l2 = static_cast<float>(number(field[4]));
  to.ahead = static_cast<float>(number(field[5]));
}

// The target's table is to be stepped whole; false when its numbers do not lie one after the other.
// `betas`: one for each moment.
inline bool read_whole(const py::tuple& betas, const TensorView& weight, Target& to) {
  const int64_t dim = weight.size[1];
  const bool alone = to.state.data == nullptr, paired = to.second.data != nullptr;
  if (to.narrow || to.narrow_state || to.stride != dim) return false;
  if ((!alone && to.state.stride != dim) || (paired && to.second.stride != dim)) return false;
  if (betas.size() != (alone ? 0 : paired ? 2 : 1))
    throw std::invalid_argument("row update: one beta each");
  to.whole = true;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(betas.ptr()); ++i)
    to.keep[i] = static_cast<float>(number(PyTuple_GET_ITEM(betas.ptr(), i)));
  if (to.action == Action::adam) to.keep[0] = 1.0f;  // it goes to the gradient by differences
  return true;
}

// Reads an `Ages` of Python, of a table of `rows` rows.
inline void read_ages(PyObject* object, int64_t rows, Ages& ages) {
  const Names& names = Names::get();
  TensorView last, awake, fades;
  const py::tuple betas = names.betas.of(object);
  const auto count = static_cast<Py_ssize_t>(betas.size());
  const int64_t blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
  const bool fits = read(names.last.of(object), last) && last.dtype == Dtype::int32 &&
                    is_flat(last) && last.size[0] == rows && read(names.awake.of(object), awake) &&
                    awake.dtype == Dtype::uint8 && is_flat(awake) && awake.size[0] == blocks &&
                    read(names.fades.of(object), fades) && fades.dtype == Dtype::float32 &&
                    fades.dims == 2 && fades.size[0] == count && count <= 2 &&
                    fades.stride[1] == 1 && fades.stride[0] == fades.size[1];
  if (!fits) throw std::invalid_argument("row ages: of another table");
  ages.last = reinterpret_cast<int32_t*>(last.data);
  ages.awake = reinterpret_cast<uint8_t*>(awake.data);
  ages.fades = reinterpret_cast<const float*>(fades.data);
  ages.known = fades.size[1];
  for (Py_ssize_t i = 0; i < count; ++i) ages.betas[i] = number(PyTuple_GET_ITEM(betas.ptr(), i));
  ages.lerps = names.lerps.of(object).cast<bool>();
  ages.now = names.now.of(object).cast<int32_t>();
  ages.wake = names.wake.of(object).cast<bool>();
}

}  // namespace recast::rows
