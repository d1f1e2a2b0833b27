#include "row_update.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// All instruction sets must round alike, so a * b + c stays two operations.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off", "no-math-errno")
#endif

#define RECAST_KERNEL "row_update_kernel.h"
#include "each_isa.h"

#if !defined(__clang__)
#pragma GCC pop_options
#endif

namespace recast::rows {

namespace {

// Entries from which a table's own sort is shared between threads.
constexpr size_t kBigSort = 1 << 16;
// Floats of gradient below which a second thread costs more than it brings.
constexpr int64_t kWorthThreads = 1 << 14;
// Gradient floats of one task: some tens of microseconds.
constexpr int64_t kTaskFloats = 1 << 16;

// Memory for entries is kept between steps: fresh pages would cost as much as the sort.
class Scratch {
 public:
  static std::shared_ptr<void> take(size_t bytes) {
    Block block;
    {
      const std::lock_guard<std::mutex> lock(mutex());
      std::swap(block, kept());
    }
    if (block.bytes < bytes) {
      block.data.reset(new char[bytes]);
      block.bytes = bytes;
    }
    auto* owner = new Block(std::move(block));
    return std::shared_ptr<void>(owner->data.get(), [owner](void*) {
      const std::lock_guard<std::mutex> lock(mutex());
      if (owner->bytes > kept().bytes && owner->bytes <= kKeep) std::swap(*owner, kept());
      delete owner;
    });
  }

 private:
  struct Block {
    std::unique_ptr<char[]> data;
    size_t bytes = 0;
  };
  static constexpr size_t kKeep = size_t{256} << 20;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static Block& kept() {
    static Block block;
    return block;
  }
};

int64_t load(const void* array, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(array)[i] : static_cast<const int32_t*>(array)[i];
}

int64_t bag_start(const Piece& piece, int64_t bag) {
  if (piece.offsets == nullptr) return bag * piece.fixed;
  return bag < piece.n_offsets ? load(piece.offsets, piece.wide_offsets, bag) : piece.n_ids;
}

// The first thing wrong with the input of a parallel region, which must not throw.
class Fault {
 public:
  void bad_id(size_t table, int64_t id) { set(table, id, false); }
  void bad_offsets(size_t table) { set(table, 0, true); }
  void check() const {
    if (!set_) return;
    if (offsets_) throw std::invalid_argument("offsets of table " + std::to_string(table_));
    throw std::out_of_range(std::to_string(table_) + " " + std::to_string(id_));
  }

 private:
  void set(size_t table, int64_t id, bool offsets) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (set_ && table_ <= table) return;
    set_ = true, table_ = table, id_ = id, offsets_ = offsets;
  }
  std::mutex mutex_;
  bool set_ = false, offsets_ = false;
  size_t table_ = 0;
  int64_t id_ = 0;
};

// Writes the entries (and sources) of bags [first, last).
void build(const Piece& piece, size_t table, int64_t rows, int64_t first, int64_t last,
           Entry* entries, Source* sources, uint32_t source_base, Fault& fault) {
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t start = bag_start(piece, bag), end = bag_start(piece, bag + 1);
    if (start < 0 || end < start || end > piece.n_ids) {
      return fault.bad_offsets(table);
    }
    float factor = piece.factor;
    if (piece.mean) {
      int64_t counted = 0;
      for (int64_t i = start; i < end; ++i)
        counted += load(piece.ids, piece.wide_ids, i) != piece.padding;
      factor /= static_cast<float>(std::max<int64_t>(counted, 1));
    }
    for (int64_t i = start; i < end; ++i) {
      const int64_t id = load(piece.ids, piece.wide_ids, i);
      if (id < 0 || id >= rows) return fault.bad_id(table, id);
      const bool none = id == piece.padding;
      entries[i].row = static_cast<uint32_t>(none ? rows : id);
      if (sources == nullptr) {
        entries[i].source = static_cast<uint32_t>(bag);
      } else {
        entries[i].source = source_base + static_cast<uint32_t>(i);
        sources[i].gradient = piece.gradient + bag * piece.stride;
        sources[i].factor = piece.weights == nullptr ? factor : factor * piece.weights[i];
      }
    }
  }
}

int bits_of(uint64_t largest) {
  int bits = 1;
  while (largest >> bits) ++bits;
  return bits;
}

// Stable sort of entries by the low `bits` of their rows. The result is in `entries`.
void sort(Entry* entries, Entry* spare, size_t n, int bits) {
  if (n <= 48) {
    for (size_t i = 1; i < n; ++i) {
      const Entry entry = entries[i];
      size_t at = i;
      for (; at > 0 && entries[at - 1].row > entry.row; --at) entries[at] = entries[at - 1];
      entries[at] = entry;
    }
    return;
  }
  const int passes = (bits + 10) / 11, width = (bits + passes - 1) / passes;
  const uint32_t mask = (1u << width) - 1;
  uint32_t place[1 << 11];
  Entry *from = entries, *to = spare;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = pass * width;
    std::memset(place, 0, sizeof(uint32_t) << width);
    for (size_t i = 0; i < n; ++i) ++place[(from[i].row >> shift) & mask];
    uint32_t before = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) {
      const uint32_t here = place[digit];
      place[digit] = before;
      before += here;
    }
    for (size_t i = 0; i < n; ++i) to[place[(from[i].row >> shift) & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != entries) std::memcpy(entries, from, n * sizeof(Entry));
}

bool is_sorted(const Entry* entries, size_t n) {
  for (size_t i = 1; i < n; ++i)
    if (entries[i - 1].row > entries[i].row) return false;
  return true;
}

// The same, by all threads: split by the leading bits, then sort the parts. A stable sort has one
// result, so that neither the number of blocks nor of threads shows in it.
void sort_big(Entry* entries, Entry* spare, size_t n, int bits, int threads) {
  const int low = std::max(bits - 8, 0);
  const size_t parts = size_t{1} << (bits - low), blocks = static_cast<size_t>(threads);
  std::vector<size_t> place(blocks * parts, 0);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (size_t block = 0; block < blocks; ++block) {
    size_t* counts = place.data() + block * parts;
    for (size_t i = n * block / blocks; i < n * (block + 1) / blocks; ++i)
      ++counts[entries[i].row >> low];
  }
  std::vector<size_t> starts(parts + 1, n);
  size_t before = 0;
  for (size_t part = 0; part < parts; ++part) {
    starts[part] = before;
    for (size_t block = 0; block < blocks; ++block) {
      const size_t here = place[block * parts + part];
      place[block * parts + part] = before;
      before += here;
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (size_t block = 0; block < blocks; ++block) {
    size_t* to = place.data() + block * parts;
    for (size_t i = n * block / blocks; i < n * (block + 1) / blocks; ++i)
      spare[to[entries[i].row >> low]++] = entries[i];
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (size_t part = 0; part < parts; ++part) {
    const size_t first = starts[part], count = starts[part + 1] - first;
    if (count == 0) continue;
    if (low > 0) sort(spare + first, entries + first, count, low);
    std::memcpy(entries + first, spare + first, count * sizeof(Entry));
  }
}

}  // namespace

Plan::Plan(std::vector<Table> tables, std::vector<Piece> pieces, int threads)
    : tables_(std::move(tables)), pieces_(std::move(pieces)), kernel_(RECAST_CHOOSE(kernel)) {
  int64_t floats = 0;
  for (const Table& table : tables_)
    for (size_t p = table.first_piece; p < table.last_piece; ++p)
      floats += pieces_[p].n_ids * table.dim;
  threads_ = floats < kWorthThreads ? 1 : std::max(threads, 1);
  sort_all();
  cut();
}

// Whether an entry can name its bag: one piece in which all ids have one factor.
bool Plan::is_direct(const Table& table) const {
  if (table.last_piece - table.first_piece != 1) return false;
  const Piece& piece = pieces_[table.first_piece];
  if (piece.weights != nullptr) return false;
  return !piece.mean || (piece.offsets == nullptr && piece.padding < 0);
}

void Plan::sort_all() {
  size_t n = 0, n_sources = 0;
  for (const Table& table : tables_) {
    Sorted sorted{};
    for (size_t p = table.first_piece; p < table.last_piece; ++p)
      sorted.n += static_cast<size_t>(pieces_[p].n_ids);
    sorted.factor = 1.0f;
    n += sorted.n;
    if (!is_direct(table)) n_sources += sorted.n;
    sorted_.push_back(sorted);
  }
  memory_ = Scratch::take(n_sources * sizeof(Source) + 2 * n * sizeof(Entry));
  auto* sources = static_cast<Source*>(memory_.get());
  auto* entries = reinterpret_cast<Entry*>(sources + n_sources);
  Entry* const spare = entries + n;
  std::vector<size_t> before(tables_.size());
  size_t sum = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    Sorted& sorted = sorted_[t];
    before[t] = sum;
    sorted.entries = entries + sum;
    sum += sorted.n;
    if (is_direct(tables_[t])) {
      const Piece& piece = pieces_[tables_[t].first_piece];
      sorted.factor = piece.mean ? piece.factor / static_cast<float>(piece.fixed) : piece.factor;
    } else {
      sorted.sources = sources;
      sources += sorted.n;
    }
  }

  Fault fault;
  const auto sort_one = [&](size_t t, int threads) {
    const Table& table = tables_[t];
    Sorted& sorted = sorted_[t];
    size_t base = 0;
    for (size_t p = table.first_piece; p < table.last_piece; ++p) {
      const Piece& piece = pieces_[p];
      Entry* const to = sorted.entries + base;
      Source* const from = sorted.sources == nullptr ? nullptr : sorted.sources + base;
      const auto ignore = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) to[i] = {static_cast<uint32_t>(table.rows), 0};
      };
      ignore(0, std::clamp<int64_t>(bag_start(piece, 0), 0, piece.n_ids));
      ignore(std::clamp<int64_t>(bag_start(piece, piece.n_bags), 0, piece.n_ids), piece.n_ids);
      const int64_t blocks = threads;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
      for (int64_t block = 0; block < blocks; ++block)
        build(piece, t, table.rows, piece.n_bags * block / blocks,
              piece.n_bags * (block + 1) / blocks, to, from, static_cast<uint32_t>(base), fault);
      base += static_cast<size_t>(piece.n_ids);
    }
    const int bits = bits_of(static_cast<uint64_t>(table.rows));
    if (!is_sorted(sorted.entries, sorted.n)) {
      if (threads > 1)
        sort_big(sorted.entries, spare + before[t], sorted.n, bits, threads);
      else
        sort(sorted.entries, spare + before[t], sorted.n, bits);
    }
    const auto none = [&](const Entry& entry) { return entry.row < table.rows; };
    sorted.valid = static_cast<size_t>(
        std::partition_point(sorted.entries, sorted.entries + sorted.n, none) - sorted.entries);
  };

  std::vector<size_t> small;
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (threads_ > 1 && sorted_[t].n >= kBigSort)
      sort_one(t, threads_);
    else
      small.push_back(t);
  }
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1) if (threads_ > 1)
  for (size_t i = 0; i < small.size(); ++i) sort_one(small[i], 1);
  fault.check();
}

// Tasks: runs of whole rows with about as many gradients each.
void Plan::cut() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    const Sorted& sorted = sorted_[t];
    const size_t step = static_cast<size_t>(
        std::max<int64_t>(kTaskFloats / std::max<int64_t>(tables_[t].dim, 1), 64));
    for (size_t first = 0; first < sorted.valid;) {
      size_t last = std::min(first + step, sorted.valid);
      while (last < sorted.valid && sorted.entries[last].row == sorted.entries[last - 1].row)
        ++last;
      tasks_.push_back({t, first, last, 0});
      first = last;
    }
  }
}

std::vector<int64_t> Plan::counts() {
  if (!counts_.empty() || tables_.empty()) return counts_;
  std::vector<int64_t> rows(tasks_.size(), 0);
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1) if (threads_ > 1)
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Entry* entries = sorted_[tasks_[i].table].entries;
    for (size_t e = tasks_[i].first; e < tasks_[i].last; ++e)
      rows[i] += e == tasks_[i].first || entries[e].row != entries[e - 1].row;
  }
  counts_.assign(tables_.size(), 0);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    tasks_[i].rows_before = counts_[tasks_[i].table];
    counts_[tasks_[i].table] += rows[i];
  }
  return counts_;
}

void Plan::run(Action action, const std::vector<Target>& targets) {
  if (targets.size() != tables_.size()) throw std::invalid_argument("one target for each table");
  if (action == Action::store) counts();
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1) if (threads_ > 1)
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Task& task = tasks_[i];
    const Sorted& sorted = sorted_[task.table];
    const Table& table = tables_[task.table];
    const Piece& piece = pieces_[table.first_piece];
    Target target = targets[task.table];
    if (action == Action::store) {
      target.ids += task.rows_before;
      target.weight += task.rows_before * target.weight_stride;
    }
    kernel_(action,
            {sorted.entries + task.first, sorted.entries + task.last, sorted.entries + sorted.valid,
             sorted.sources, piece.gradient, piece.stride, sorted.factor, table.dim},
            target);
  }
}

}  // namespace recast::rows

namespace py = pybind11;
using namespace recast::rows;

namespace {

// Flat arrays of numbers cross from Python fastest. Their layouts are those of `row_kernel.py`.
constexpr size_t kTableFields = 3, kPieceFields = 13, kTargetFields = 5, kTargetNumbers = 3;

// A Python array.array as numbers, while the call lasts.
template <class T>
class Numbers {
 public:
  explicit Numbers(const py::buffer& buffer) : info_(buffer.request()) {
    if (info_.ndim != 1 || info_.itemsize != sizeof(T) || !info_.item_type_is_equivalent_to<T>())
      throw std::invalid_argument("row plan: an array of the wrong type");
  }
  size_t size() const { return static_cast<size_t>(info_.size); }
  const T* data() const { return static_cast<const T*>(info_.ptr); }
  T operator[](size_t i) const { return data()[i]; }

 private:
  py::buffer_info info_;
};
using Integers = Numbers<int64_t>;
using Floats = Numbers<float>;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

std::unique_ptr<Plan> make_plan(const py::buffer& table_fields, const py::buffer& piece_fields,
                                const py::buffer& piece_factors, int threads) {
  const Integers tables(table_fields), pieces(piece_fields);
  const Floats factors(piece_factors);
  if (tables.size() % kTableFields || pieces.size() != factors.size() * kPieceFields)
    throw std::invalid_argument("row plan: arrays of the wrong length");
  std::vector<Plan::Table> all_tables;
  size_t piece = 0;
  for (size_t i = 0; i < tables.size(); i += kTableFields) {
    const size_t first = piece;
    piece += static_cast<size_t>(tables[i + 2]);
    all_tables.push_back({tables[i], tables[i + 1], first, piece});
  }
  if (piece != factors.size()) throw std::invalid_argument("row plan: pieces without a table");
  std::vector<Piece> all_pieces;
  for (size_t i = 0; i < factors.size(); ++i) {
    const int64_t* f = pieces.data() + i * kPieceFields;
    all_pieces.push_back({pointer<const void>(f[0]), pointer<const void>(f[1]),
                          pointer<const float>(f[2]), pointer<const float>(f[3]), f[4], f[5], f[6],
                          f[7], f[8], f[9], factors[i], f[10] != 0, f[11] != 0, f[12] != 0});
  }
  const py::gil_scoped_release release;
  return std::make_unique<Plan>(std::move(all_tables), std::move(all_pieces), threads);
}

void run_plan(Plan& plan, Action action, const py::buffer& target_places,
              const py::buffer& target_numbers) {
  const Integers places(target_places);
  const Floats numbers(target_numbers);
  const size_t n = places.size() / kTargetFields;
  if (places.size() % kTargetFields || numbers.size() != n * kTargetNumbers)
    throw std::invalid_argument("row plan: arrays of the wrong length");
  std::vector<Target> targets;
  for (size_t i = 0; i < n; ++i) {
    const int64_t* p = places.data() + i * kTargetFields;
    const float* x = numbers.data() + i * kTargetNumbers;
    targets.push_back({pointer<float>(p[0]), p[1], pointer<float>(p[2]), p[3],
                       pointer<int64_t>(p[4]), x[0], x[1], x[2]});
  }
  const py::gil_scoped_release release;
  plan.run(action, targets);
}

}  // namespace

void bind_row_update(py::module_& module) {
  py::enum_<Action>(module, "RowAction")
      .value("sgd", Action::sgd)
      .value("adagrad", Action::adagrad)
      .value("store", Action::store);
  py::class_<Plan>(module, "RowPlan", "The sorted gradients of many tables; see row_kernel.py.")
      .def(py::init(&make_plan), py::arg("tables"), py::arg("pieces"), py::arg("factors"),
           py::arg("threads"))
      .def("counts", &Plan::counts, "Rows with a gradient, for each table.")
      .def("run", &run_plan, py::arg("action"), py::arg("places"), py::arg("numbers"));
}
