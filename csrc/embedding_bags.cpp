// All embedding lookups of a step: reads the user's tables where they are, checks ids before they
// are used, and splits the bags of all lookups over threads by the bytes they move.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "embedding_lookup.h"
#include "embedding_stack.h"
#include "isa.h"
#include "parallel.h"
#include "tensor.h"

namespace py = pybind11;

namespace recast::embedding {

// Bags of one lookup whose ids are checked, contiguous and free of padding.
struct Run {
  const char* table;
  int64_t rows;
  Format format;
  bool widens;         // the output is float32, whatever the table
  int64_t row_bytes;   // from one row to the next
  int64_t used_bytes;  // of a row
  int64_t out_bytes;   // of a row of the output
  int64_t out_stride;  // from one row of it to the next
  int64_t dim;
  Mode mode;
  int64_t bags;
  int64_t fixed;          // ids per bag, when starts is null
  const int64_t* starts;  // bags + 1 places in ids
  const int64_t* ids;
  const float* weights;  // one per id, or null
  char* out;             // the rows of the bags
  int64_t* winner;       // (bags, dim) row that won each column of a max, or null

  template <class T>
  const T* row(int64_t id) const {
    return reinterpret_cast<const T*>(table + id * row_bytes);
  }
  // The place in ids where a bag starts; for `bags`, where the last one ends.
  int64_t start(int64_t bag) const { return starts != nullptr ? starts[bag] : bag * fixed; }
  // Whether each bag is the row of one id.
  bool copies() const {
    return starts == nullptr && fixed == 1 && weights == nullptr && mode != Mode::max;
  }
};

}  // namespace recast::embedding

// Equal results on every machine: a * b + c is rounded twice everywhere.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed inside inlined functions only
#endif
#define RECAST_KERNEL "embedding_bags_kernel.h"
#include "each_isa.h"
#if !defined(__clang__)
#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif

namespace recast::embedding {
namespace {

// Rows narrower than a register are pooled in narrower ones; the portable kernel's hold 4 floats,
// and it converts other formats one by one.
void pool(const Run& run) {
#if defined(__x86_64__)
  if (isa() == Isa::avx512 && run.dim >= 16) return avx512::pool(run);
  if (isa() != Isa::portable && (run.dim >= 8 || run.format != Format::float32))
    return avx2::pool(run);
#endif
  portable::pool(run);
}

// Below this many bytes a second thread costs more than it saves.
constexpr int64_t kWorthThreads = 1 << 16;
// Tasks per thread, to balance the load; not more, as the first rows of each are not prefetched.
constexpr int64_t kTasksPerThread = 8;

struct Task {
  int32_t lookup;  // the first of `stack`
  int64_t first, last;
  const std::vector<size_t>* stack;  // of which all rows are copied; null: of one lookup
};

enum class Wrong { offset, id };
// The first wrong value, in order of lookup, offsets before ids, then position.
struct Failure {
  int64_t lookup = INT64_MAX;
  Wrong wrong = Wrong::id;
  int64_t position = 0;
  bool operator<(const Failure& other) const {
    if (lookup != other.lookup) return lookup < other.lookup;
    if (wrong != other.wrong) return wrong == Wrong::offset;
    return position < other.position;
  }
};

float load_weight(const TensorView& weights, int64_t place) {
  if (weights.dtype == Dtype::float32) return reinterpret_cast<const float*>(weights.data)[place];
  const uint16_t found = reinterpret_cast<const uint16_t*>(weights.data)[place];
  return weights.dtype == Dtype::float16 ? portable::half_to_float(found)
                                         : portable::brain_to_float(found);
}

// Memory of one thread, kept between calls.
struct Scratch {
  std::vector<int64_t> ids, starts;
  std::vector<float> weights;
};

// Lookups whose outputs are parts of one matrix.
struct Joined {
  std::vector<size_t> places;
  int64_t dim;
  Dtype dtype;
  bool alone;  // others may not join
};

class Step : public Lookups {
 public:
  std::vector<Joined> joined;
  std::vector<std::vector<size_t>> stacks;  // lookups that write a row side by side

  Failure run(int threads) {
    int64_t bytes = 0;
    for (const Lookup& lookup : lookups) bytes += bytes_of(lookup);
    if (bytes < kWorthThreads) threads = 1;
    const int64_t share = threads > 1 ? bytes / (threads * kTasksPerThread) + 1 : bytes + 1;
    std::vector<Task> tasks;
    std::vector<bool> copied(lookups.size());
    for (const auto& stack : stacks) {
      if (!takes_turns(lookups, stack)) continue;
      for (const size_t k : stack) copied[k] = true;
      split(stack[0], static_cast<int64_t>(stack.size()), share, &stack, tasks);
    }
    for (size_t k = 0; k < lookups.size(); ++k)
      if (!copied[k]) split(k, 1, share, nullptr, tasks);
    Failure worst;
    std::mutex writes;
    const auto count = static_cast<int64_t>(tasks.size());
    parallel_dynamic(count <= 1 ? 1 : threads, count, [&](int64_t i, int) {
      const Failure found = run(tasks[static_cast<size_t>(i)]);
      if (found.lookup == INT64_MAX) return;
      const std::lock_guard<std::mutex> lock(writes);
      worst = std::min(worst, found);
    });
    return worst;
  }

 private:
  static int64_t bytes_of(const Lookup& lookup) {
    return lookup.count * (lookup.used_bytes() + 8) + lookup.bags * (lookup.out_bytes() + 8);
  }

  // Cuts `count` lookups like number k into tasks of about `share` bytes.
  void split(size_t k, int64_t count, int64_t share, const std::vector<size_t>* stack,
             std::vector<Task>& tasks) const {
    const Lookup& lookup = lookups[k];
    if (lookup.bags == 0) return;
    const int64_t pieces = std::clamp<int64_t>(bytes_of(lookup) * count / share, 1, lookup.bags);
    for (int64_t i = 0; i < pieces; ++i)
      tasks.push_back({static_cast<int32_t>(k), lookup.bags * i / pieces,
                       lookup.bags * (i + 1) / pieces, stack});
  }

  // Start of a bag; for the bag after the last one, its end.
  static int64_t start_of(const Lookup& lookup, int64_t bag) {
    if (bag >= lookup.offsets.size[0]) return lookup.count;
    return load(lookup.offsets, bag * lookup.offsets.stride[0]);
  }

  Failure run(const Task& task) const {
    if (task.stack != nullptr) {
      if (copy_stack(lookups, *task.stack, task.first, task.last)) return Failure{};
      return first_failure(*task.stack);
    }
    static thread_local Scratch scratch;
    const Lookup& lookup = lookups[task.lookup];
    Run run{};
    run.table = lookup.table.data;
    run.rows = lookup.table.size[0];
    run.format = lookup.format;
    run.widens = lookup.out_dtype == Dtype::float32;
    run.used_bytes = lookup.used_bytes();
    run.out_bytes = lookup.out_bytes();
    run.row_bytes = lookup.table.stride[0] * lookup.element_bytes();
    run.dim = lookup.dim;
    run.mode = lookup.mode;
    run.bags = task.last - task.first;
    run.fixed = lookup.fixed;
    run.out_stride = lookup.out_stride;
    run.out = lookup.out + task.first * run.out_stride;
    run.winner = lookup.winner == nullptr ? nullptr : lookup.winner + task.first * run.dim;
    Failure failure;
    failure.lookup = task.lookup;
    if (!gather(lookup, task, scratch, run, failure)) return failure;
    pool(run);
    return Failure{};
  }

  Failure first_failure(const std::vector<size_t>& stack) const {
    Failure first;
    for (const size_t k : stack) {
      const int64_t wrong = first_wrong(lookups[k]);
      if (wrong >= 0) first = std::min(first, {static_cast<int64_t>(k), Wrong::id, wrong});
    }
    return first;
  }

  // Fills `run` with the ids of a task: checked, int64, contiguous, no padding; copied if need be.
  static bool gather(const Lookup& lookup, const Task& task, Scratch& scratch, Run& run,
                     Failure& failure) {
    if (lookup.has_offsets && !check_offsets(lookup, task, failure)) return false;
    return lookup.ids.dtype == Dtype::int64
               ? gather_as<int64_t>(lookup, task, scratch, run, failure)
               : gather_as<int32_t>(lookup, task, scratch, run, failure);
  }

  template <class Id>
  static bool gather_as(const Lookup& lookup, const Task& task, Scratch& scratch, Run& run,
                        Failure& failure) {
    const bool ragged = lookup.has_offsets;
    const int64_t begin = ragged ? start_of(lookup, task.first) : task.first * lookup.fixed;
    const int64_t end = ragged ? start_of(lookup, task.last) : task.last * lookup.fixed;
    const auto* ids = reinterpret_cast<const Id*>(lookup.ids.data);
    const auto rows = static_cast<uint64_t>(lookup.table.size[0]);
    failure.wrong = Wrong::id;

    if (!ragged && lookup.fixed == 1 && lookup.padding < 0 && !lookup.has_weights)
      return column(lookup, task, scratch, run, failure, ids, rows);
    if (!is_run(lookup) || lookup.padding >= 0) {
      return copy(lookup, task, scratch, run, failure, ids, rows, static_cast<size_t>(end - begin));
    }
    bool good = true;
    for (int64_t i = begin; i < end; ++i)
      good &= static_cast<uint64_t>(static_cast<int64_t>(ids[i])) < rows;
    if (!good) {
      failure.position = begin;
      while (static_cast<uint64_t>(static_cast<int64_t>(ids[failure.position])) < rows)
        ++failure.position;
      return false;
    }
    if constexpr (sizeof(Id) == sizeof(int64_t)) {
      run.ids = ids + begin;
    } else {
      scratch.ids.assign(ids + begin, ids + end);
      run.ids = scratch.ids.data();
    }
    if (lookup.has_weights) {
      if (lookup.weights.dtype == Dtype::float32) {
        run.weights = reinterpret_cast<const float*>(lookup.weights.data) + begin;
      } else {
        scratch.weights.resize(static_cast<size_t>(end - begin));
        for (int64_t i = begin; i < end; ++i)
          scratch.weights[i - begin] = load_weight(lookup.weights, i);
        run.weights = scratch.weights.data();
      }
    }
    if (ragged) {
      scratch.starts.resize(static_cast<size_t>(run.bags) + 1);
      for (int64_t bag = task.first; bag <= task.last; ++bag)
        scratch.starts[bag - task.first] = start_of(lookup, bag) - begin;
      run.starts = scratch.starts.data();
    }
    return true;
  }

  // The same for bags of one id each.
  template <class Id>
  static bool column(const Lookup& lookup, const Task& task, Scratch& scratch, Run& run,
                     Failure& failure, const Id* ids, uint64_t rows) {
    const bool copies = sizeof(Id) != sizeof(int64_t) || lookup.outer != 1;
    if (copies && scratch.ids.size() < static_cast<size_t>(run.bags))
      scratch.ids.resize(static_cast<size_t>(run.bags));
    const Id* from = ids + task.first * lookup.outer;
    bool good = true;
    for (int64_t i = 0; i < run.bags; ++i) {
      const int64_t id = from[i * lookup.outer];
      good &= static_cast<uint64_t>(id) < rows;
      if (copies) scratch.ids[i] = id;
    }
    if (!good) {
      failure.position = task.first;
      while (static_cast<uint64_t>(static_cast<int64_t>(ids[failure.position * lookup.outer])) <
             rows)
        ++failure.position;
      return false;
    }
    run.ids = copies ? scratch.ids.data() : reinterpret_cast<const int64_t*>(from);
    return true;
  }

  // Whether ids (and weights) are contiguous.
  static bool is_run(const Lookup& lookup) {
    const auto dense = [&](int64_t outer, int64_t inner) {
      if (lookup.has_offsets) return inner == 1 || lookup.count <= 1;
      return (inner == 1 || lookup.fixed <= 1) && (outer == lookup.fixed || lookup.bags <= 1);
    };
    return dense(lookup.outer, lookup.inner) &&
           (!lookup.has_weights || dense(lookup.weights_outer, lookup.weights_inner));
  }

  template <class Id>
  static bool copy(const Lookup& lookup, const Task& task, Scratch& scratch, Run& run,
                   Failure& failure, const Id* ids, uint64_t rows, size_t room) {
    const bool ragged = lookup.has_offsets, starts = ragged || lookup.padding >= 0;
    if (scratch.ids.size() < room) scratch.ids.resize(room);
    if (lookup.has_weights && scratch.weights.size() < room) scratch.weights.resize(room);
    if (starts) scratch.starts.resize(static_cast<size_t>(run.bags) + 1);
    int64_t kept = 0;
    for (int64_t bag = task.first; bag < task.last; ++bag) {
      if (starts) scratch.starts[bag - task.first] = kept;
      const int64_t from = ragged ? start_of(lookup, bag) : 0;
      const int64_t to = ragged ? start_of(lookup, bag + 1) : lookup.fixed;
      const int64_t base = ragged ? 0 : bag * lookup.outer;
      const int64_t weights_base = ragged ? 0 : bag * lookup.weights_outer;
      for (int64_t i = from; i < to; ++i) {
        const int64_t id = ids[base + i * lookup.inner];
        if (static_cast<uint64_t>(id) >= rows) {
          failure.position = ragged ? i : bag * lookup.fixed + i;
          return false;
        }
        if (id == lookup.padding) continue;
        scratch.ids[kept] = id;
        if (lookup.has_weights)
          scratch.weights[kept] =
              load_weight(lookup.weights, weights_base + i * lookup.weights_inner);
        ++kept;
      }
    }
    if (starts) scratch.starts[run.bags] = kept;
    run.ids = scratch.ids.data();
    run.starts = starts ? scratch.starts.data() : nullptr;
    run.weights = lookup.has_weights ? scratch.weights.data() : nullptr;
    return true;
  }

  static bool check_offsets(const Lookup& lookup, const Task& task, Failure& failure) {
    failure.wrong = Wrong::offset;
    int64_t before = task.first == 0 ? 0 : start_of(lookup, task.first);
    for (int64_t bag = task.first; bag <= task.last; ++bag) {
      const int64_t start = start_of(lookup, bag);
      failure.position = bag;
      const bool first_wrong = bag == 0 && start != 0;
      if (first_wrong || start < before || start > lookup.count) return false;
      before = start;
    }
    return true;
  }
};

constexpr int64_t kNoPadding = INT64_MIN;

// What stays the same from call to call, read from Python once.
struct Layout {
  std::vector<int> table;
  std::vector<Mode> mode;
  std::vector<int64_t> padding;
  std::vector<bool> last_is_end;
  std::vector<Packed> packed;  // one per table; empty: dtypes give the formats

  // `formats`, `dims`: of the tables, when outputs are float32 whatever the storage; else empty.
  Layout(std::vector<int> table, const std::vector<int>& modes,
         const std::vector<std::optional<int64_t>>& paddings, std::vector<bool> last_is_end,
         const std::vector<int>& formats, const std::vector<int64_t>& dims)
      : table(std::move(table)), last_is_end(std::move(last_is_end)) {
    for (const int m : modes) mode.push_back(static_cast<Mode>(m));
    for (const auto& p : paddings) padding.push_back(p.value_or(kNoPadding));
    for (size_t t = 0; t < formats.size(); ++t)
      packed.push_back({static_cast<Format>(formats[t]), dims.at(t)});
  }
};

// Reads the arguments of a call; null when the kernels do not take one of its lookups.
std::unique_ptr<Step> make_step(const Layout& layout, const py::list& weights, const py::list& ids,
                                const py::list& offsets, const py::list& sample_weights) {
  const TensorReader& reader = TensorReader::get();
  const size_t count = layout.table.size();
  if (ids.size() != count || offsets.size() != count || sample_weights.size() != count)
    return nullptr;
  std::vector<TensorView> tables(weights.size());
  for (size_t t = 0; t < tables.size(); ++t)
    if (!reader.read(weights[t].ptr(), tables[t])) return nullptr;
  auto step = std::make_unique<Step>();
  step->lookups.resize(count);
  for (size_t k = 0; k < count; ++k) {
    Lookup& lookup = step->lookups[k];
    if (layout.table[k] < 0 || static_cast<size_t>(layout.table[k]) >= tables.size())
      return nullptr;
    lookup.table = tables[layout.table[k]];
    lookup.mode = layout.mode[k];
    lookup.winner = nullptr;
    lookup.has_offsets = !offsets[k].is_none();
    lookup.has_weights = !sample_weights[k].is_none();
    if (!reader.read(ids[k].ptr(), lookup.ids)) return nullptr;
    if (lookup.has_offsets && !reader.read(offsets[k].ptr(), lookup.offsets)) return nullptr;
    if (lookup.has_weights && !reader.read(sample_weights[k].ptr(), lookup.weights)) return nullptr;
    const Packed* packed = layout.packed.empty() ? nullptr : &layout.packed.at(layout.table[k]);
    if (!read_format(lookup, packed)) return nullptr;
    if (!prepare(lookup, layout.padding[k], layout.last_is_end[k])) return nullptr;
  }
  return step;
}

// None, or (lookup, is an offset, position) of the first wrong value.
py::object run_lookups(Step& step, int threads) {
  Failure failure;
  {
    const py::gil_scoped_release release;
    failure = step.run(threads);
  }
  if (failure.lookup == INT64_MAX) return py::none();
  return py::make_tuple(failure.lookup, failure.wrong == Wrong::offset, failure.position);
}

// None, or (lookup, False, position) of the first wrong id; only for lookups that give rows.
py::object check_rows(const Step& step) {
  for (size_t k = 0; k < step.lookups.size(); ++k) {
    const Lookup& lookup = step.lookups[k];
    const int64_t wrong = first_wrong(lookup);
    if (wrong >= 0) return py::make_tuple(k, false, wrong);
  }
  return py::none();
}

// Runs a step into `outs`, (bags, dim) contiguous, and `winners`: of the max lookups, or none.
py::object run_step(Step& step, const py::list& outs, const py::list& winners, int threads) {
  const TensorReader& reader = TensorReader::get();
  size_t next = 0;
  for (size_t k = 0; k < step.lookups.size(); ++k) {
    Lookup& lookup = step.lookups[k];
    TensorView out;
    if (!reader.read(outs[k].ptr(), out) || out.dtype != lookup.out_dtype ||
        out.numel() != lookup.bags * lookup.dim)
      throw py::value_error("embedding_bags: an output does not fit its lookup");
    lookup.out = out.data;
    lookup.out_stride = lookup.out_bytes();
    if (lookup.mode != Mode::max || winners.empty()) continue;
    TensorView winner;
    if (!reader.read(winners[next++].ptr(), winner) || winner.dtype != Dtype::int64 ||
        winner.numel() != out.numel())
      throw py::value_error("embedding_bags: a winner does not fit its lookup");
    lookup.winner = reinterpret_cast<int64_t*>(winner.data);
  }
  return run_lookups(step, threads);
}

// Whether a lookup gives one row a sample: (bags, dim), or (bags, 1, dim) for ids (bags, 1).
bool is_row(const Lookup& lookup) {
  const TensorView& ids = lookup.ids;
  return lookup.mode != Mode::none || ids.dims == 1 || (ids.dims == 2 && ids.size[1] == 1);
}

// Lookups, as lists of places, are to write stacks (bags, lookups, dim). False, and nothing is
// changed, if those of one differ in size or dtype.
bool stack(Step& step, std::vector<std::vector<size_t>> stacks) {
  std::vector<bool> seen(step.lookups.size());
  for (const auto& one : stacks) {
    const Lookup& first = step.lookups.at(one.at(0));
    for (const size_t k : one) {
      const Lookup& lookup = step.lookups.at(k);
      if (seen[k]) throw py::value_error("embedding_bags: a lookup is in stacks twice");
      seen[k] = true;
      const bool alike = lookup.bags == first.bags && lookup.dim == first.dim &&
                         lookup.out_dtype == first.out_dtype;
      if (!alike || !is_row(lookup)) return false;
    }
  }
  step.stacks = std::move(stacks);
  return true;
}

// Groups lookups of no stack whose outputs can be parts of one matrix, one after the other: of one
// width and dtype. An output of other than two dimensions is alone.
void join(Step& step) {
  step.joined.clear();
  std::vector<bool> stacked(step.lookups.size());
  for (const auto& stack : step.stacks)
    for (const size_t k : stack) stacked[k] = true;
  for (size_t k = 0; k < step.lookups.size(); ++k) {
    if (stacked[k]) continue;
    const Lookup& lookup = step.lookups[k];
    const bool alone = lookup.mode == Mode::none && lookup.ids.dims != 1;
    auto& all = step.joined;
    const auto fits = [&](const Joined& other) {
      return !alone && !other.alone && other.dim == lookup.dim && other.dtype == lookup.out_dtype;
    };
    auto found = std::find_if(all.begin(), all.end(), fits);
    if (found == all.end())
      found = all.insert(all.end(), {{}, lookup.dim, lookup.out_dtype, alone});
    found->places.push_back(k);
  }
}

// A new tensor by `empty(shape, dtype)`.
py::object made(const py::object& empty, const std::vector<int64_t>& shape,
                const py::handle& dtype) {
  py::tuple sizes(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) sizes[d] = shape[d];
  return empty(sizes, dtype);
}

// The outputs of all lookups in no stack, in order; `wholes` gets the tensors that they share.
// `dtypes`: one per lookup.
py::list allocate(Step& step, const py::list& dtypes, const py::object& empty, py::list& wholes) {
  static const py::object* split = new py::object(
      py::module_::import("torch").attr("unsafe_split_with_sizes"));  // no views of each other
  join(step);
  std::vector<py::object> outs(step.lookups.size());
  for (const Joined& group : step.joined) {
    const size_t first = group.places[0];
    const Lookup& lookup = step.lookups[first];
    std::vector<int64_t> shape;
    if (group.alone) {
      for (int d = 0; d < lookup.ids.dims; ++d) shape.push_back(lookup.ids.size[d]);
    } else {
      shape.push_back(0);
      for (const size_t k : group.places) shape[0] += step.lookups[k].bags;
    }
    shape.push_back(group.dim);
    py::object whole = made(empty, shape, dtypes[first]);
    wholes.append(whole);
    if (group.places.size() == 1) {
      outs[first] = std::move(whole);
      continue;
    }
    py::list bags(group.places.size());
    for (size_t i = 0; i < group.places.size(); ++i) bags[i] = step.lookups[group.places[i]].bags;
    const py::object parts = (*split)(whole, bags);
    for (size_t i = 0; i < group.places.size(); ++i) outs[group.places[i]] = parts[py::int_(i)];
  }
  py::list found;
  for (const py::object& out : outs)
    if (out) found.append(out);
  return found;
}

// Lets lookups write to `out`, one after the other or, `side_by_side`, next to each other.
void place(Step& step, const std::vector<size_t>& places, const py::handle& out,
           bool side_by_side) {
  const Lookup& first = step.lookups[places.at(0)];
  TensorView view;
  const bool read = TensorReader::get().read(out.ptr(), view) && view.dtype == first.out_dtype;
  const int64_t side = side_by_side ? static_cast<int64_t>(places.size()) : 1;
  char* at = view.data;
  int64_t count = 0;
  for (const size_t k : places) {
    Lookup& lookup = step.lookups[k];
    lookup.out = at;
    lookup.out_stride = lookup.out_bytes() * side;
    at += lookup.out_bytes() * (side_by_side ? 1 : lookup.bags);
    count += lookup.bags * lookup.dim;
  }
  if (!read || count != view.numel())
    throw py::value_error("embedding_bags: the output does not fit its lookups");
}

// Runs a step into new tensors: the outputs, of stacks before those of all other lookups, and the
// failure. `dtypes`: one per lookup.
py::tuple run_new(Step& step, const py::list& dtypes, const py::object& empty, int threads) {
  py::list outs, wholes;
  for (const auto& stack : step.stacks) {
    const Lookup& first = step.lookups[stack[0]];
    const auto count = static_cast<int64_t>(stack.size());
    outs.append(made(empty, {first.bags, count, first.dim}, dtypes[stack[0]]));
    place(step, stack, outs[outs.size() - 1], true);
  }
  const py::list others = allocate(step, dtypes, empty, wholes);
  for (size_t g = 0; g < step.joined.size(); ++g)
    place(step, step.joined[g].places, wholes[g], false);
  for (const py::handle out : others) outs.append(out);
  return py::make_tuple(outs, run_lookups(step, threads));
}

py::list shapes(const Step& step) {
  py::list found(step.lookups.size());
  for (size_t k = 0; k < step.lookups.size(); ++k) {
    const Lookup& lookup = step.lookups[k];
    found[k] = py::make_tuple(lookup.bags, lookup.dim);
  }
  return found;
}

}  // namespace
}  // namespace recast::embedding

void bind_embedding_bags(py::module_& m) {
  using namespace recast::embedding;
  py::class_<Layout>(m, "EmbeddingLayout")
      .def(py::init<std::vector<int>, const std::vector<int>&,
                    const std::vector<std::optional<int64_t>>&, std::vector<bool>,
                    const std::vector<int>&, const std::vector<int64_t>&>(),
           py::arg("table"), py::arg("modes"), py::arg("padding_idx"),
           py::arg("include_last_offset"), py::arg("formats") = std::vector<int>{},
           py::arg("dims") = std::vector<int64_t>{});
  py::class_<Lookups>(m, "Lookups");
  py::class_<Step, Lookups>(m, "EmbeddingStep")
      .def("gives_rows", [](const Step& step) { return gives_rows(step); })
      .def("check_rows", &check_rows)
      .def("shapes", &shapes)
      .def("stack", &stack)
      .def("run", &run_step)
      .def("run_new", &run_new);
  m.def("embedding_step", &make_step);
}
