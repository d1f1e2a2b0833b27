#include "row_update.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "isa.h"
#include "parallel.h"

#define RECAST_KERNEL "row_update_kernel.h"
#include "each_isa_exact.h"

namespace recast::rows {

namespace {

// Entries that are sorted one by one.
constexpr size_t kFewEntries = 48;
// Entries from which a table's own sort is shared between threads.
constexpr size_t kBigSort = 1 << 16;
// Floats of gradient below which a second thread costs more than it saves.
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

// Table, first entry of the piece in it, bag: where in a step something is wrong.
using Place = std::tuple<size_t, size_t, int64_t>;

// What is wrong at the first place of all that threads find, whichever is the fastest. A table with
// a fault has entries that were never written.
class Fault {
 public:
  void bad_id(const Place& place, int64_t id) { set(place, {std::get<0>(place), id, false}); }
  void bad_offsets(const Place& place) { set(place, {std::get<0>(place), 0, true}); }
  bool found() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return found_;
  }
  void check() {
    if (found()) throw what_;
  }

 private:
  void set(const Place& place, const BadInput& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (found_ && place_ <= place) return;
    found_ = true, place_ = place, what_ = what;
  }
  std::mutex mutex_;
  bool found_ = false;
  Place place_{};
  BadInput what_{};
};

// Writes the entries (and sources) of bags [first, last), up to the first that is wrong.
void build(const Piece& piece, size_t table, int64_t rows, int64_t first, int64_t last,
           Entry* entries, Source* sources, uint32_t source_base, Fault& fault) {
  for (int64_t bag = first; bag < last; ++bag) {
    const int64_t start = bag_start(piece, bag), end = bag_start(piece, bag + 1);
    if (start < 0 || (bag == 0 && start > 0) || end < start || end > piece.n_ids) {
      return fault.bad_offsets({table, source_base, bag});
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
      if (id < 0 || id >= rows) return fault.bad_id({table, source_base, bag}, id);
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

// A radix sort of rows of `bits` bits: its digits, and where the entries of each begin.
struct Digits {
  static constexpr int kWidest = 11;  // bits of a digit, so that 32 take three passes

  explicit Digits(int bits)
      : passes((bits + kWidest - 1) / kWidest), width((bits + passes - 1) / passes) {
    for (int pass = 0; pass < passes; ++pass)
      std::memset(places[pass], 0, sizeof(uint32_t) << width);
  }
  uint32_t of(uint32_t row, int pass) const {
    return (row >> (pass * width)) & ((1u << width) - 1);
  }
  // Counts the digits of row(0), ..., row(n - 1), of all passes at once; called before `begin`.
  template <class Row>
  void count(size_t n, const Row& row) {
    if (passes == 1) return count_of<1>(n, row);
    if (passes == 2) return count_of<2>(n, row);
    count_of<3>(n, row);
  }
  // Turns the counts of a pass into the place of each digit's first entry.
  uint32_t* begin(int pass) {
    uint32_t before = 0;
    for (uint32_t digit = 0; digit < (1u << width); ++digit) {
      const uint32_t here = places[pass][digit];
      places[pass][digit] = before;
      before += here;
    }
    return places[pass];
  }

  const int passes, width;
  uint32_t places[3][1 << kWidest];

 private:
  template <int kPasses, class Row>
  void count_of(size_t n, const Row& row) {
    for (size_t i = 0; i < n; ++i) {
      const uint32_t one = row(i);
      for (int pass = 0; pass < kPasses; ++pass) ++places[pass][of(one, pass)];
    }
  }
};

// The passes from `first` on, forth and back between `from`, which holds the entries, and `to`.
void sort_from(int first, Digits& digits, Entry* from, Entry* to, size_t n) {
  for (int pass = first; pass < digits.passes; ++pass) {
    uint32_t* const place = digits.begin(pass);
    for (size_t i = 0; i < n; ++i) to[place[digits.of(from[i].row, pass)]++] = from[i];
    std::swap(from, to);
  }
}

// Stable sort of entries by the low `bits` of their rows. The result is in `entries`.
void sort(Entry* entries, Entry* spare, size_t n, int bits) {
  if (n <= kFewEntries) {
    for (size_t i = 1; i < n; ++i) {
      const Entry entry = entries[i];
      size_t at = i;
      for (; at > 0 && entries[at - 1].row > entry.row; --at) entries[at] = entries[at - 1];
      entries[at] = entry;
    }
    return;
  }
  Digits digits(bits);
  digits.count(n, [&](size_t i) { return entries[i].row; });
  sort_from(0, digits, entries, spare, n);
  if (digits.passes % 2 == 1) std::memcpy(entries, spare, n * sizeof(Entry));
}

constexpr size_t kIdsAhead = 256;

// Always inlined: GCC drops calls of a function that only prefetches, as it has no effect.
inline __attribute__((always_inline)) void prefetch(const void* at) {
  __builtin_prefetch(at, 0, 2);
}

// Whether all ids of a piece are in bags of one size.
bool is_even(const Piece& piece) {
  return piece.offsets == nullptr && piece.fixed > 0 && piece.n_bags * piece.fixed == piece.n_ids;
}

// The sorted entries of such a piece, whose table is direct: the first pass of the sort makes them
// from the ids. Ids and entries are prefetched although they lie one after the other: on a virtual
// Xeon whose processor did not do so itself, a sort of 40,960 ids takes half the time.
template <class Id>
void sort_ids(const Piece& piece, size_t table, int64_t rows, Entry* entries, Entry* spare,
              int bits, Fault& fault) {
  const auto* const ids = static_cast<const Id*>(piece.ids);
  const auto n = static_cast<size_t>(piece.n_ids);
  const auto row = [&](size_t i) {
    const int64_t id = ids[i];
    return static_cast<uint32_t>(id == piece.padding ? rows : id);
  };
  Digits digits(bits);
  bool wrong = false, sorted = true;
  Id before = ids[0];
  digits.count(n, [&](size_t i) {
    prefetch(ids + i + kIdsAhead);
    wrong |= static_cast<uint64_t>(static_cast<int64_t>(ids[i])) >= static_cast<uint64_t>(rows);
    sorted &= before <= ids[i];
    before = ids[i];
    return row(i);
  });
  if (wrong) {
    size_t i = 0;
    while (ids[i] >= 0 && ids[i] < rows) ++i;
    return fault.bad_id({table, 0, 0}, ids[i]);
  }
  sorted &= piece.padding < 0;  // ids that get no gradient sort behind all others
  const auto each = [&](const auto& place) {
    size_t i = 0;
    for (uint32_t bag = 0; i < n; ++bag)
      for (const size_t end = i + static_cast<size_t>(piece.fixed); i < end; ++i) {
        const uint32_t of = row(i);
        *place(i, of) = {of, bag};
      }
  };
  if (sorted) return each([&](size_t i, uint32_t) { return entries + i; });
  const bool odd = digits.passes % 2 == 1;
  Entry *const first = odd ? entries : spare, *const second = odd ? spare : entries;
  uint32_t* const place = digits.begin(0);
  each([&](size_t i, uint32_t of) {
    prefetch(second + i);
    return first + place[digits.of(of, 0)]++;
  });
  sort_from(1, digits, first, second, n);
}

bool is_sorted(const Entry* entries, size_t n) {
  for (size_t i = 1; i < n; ++i)
    if (entries[i - 1].row > entries[i].row) return false;
  return true;
}

// The same, with all threads: splits by the leading bits, then sorts the parts. The result of a
// stable sort is unique, so it does not depend on the number of blocks or threads.
void sort_big(Entry* entries, Entry* spare, size_t n, int bits, int threads) {
  const int low = std::max(bits - 8, 0);
  const size_t parts = size_t{1} << (bits - low), blocks = static_cast<size_t>(threads);
  std::vector<size_t> place(blocks * parts, 0);
  const auto each_entry = [&](size_t block, const auto& visit) {
    size_t* const own = place.data() + block * parts;
    for (size_t i = n * block / blocks; i < n * (block + 1) / blocks; ++i)
      visit(entries[i], own[entries[i].row >> low]);
  };
  parallel_static(threads, threads, [&](int64_t block, int) {
    each_entry(static_cast<size_t>(block), [](const Entry&, size_t& count) { ++count; });
  });
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
  parallel_static(threads, threads, [&](int64_t block, int) {
    each_entry(static_cast<size_t>(block),
               [&](const Entry& entry, size_t& next) { spare[next++] = entry; });
  });
  parallel_dynamic(threads, static_cast<int64_t>(parts), [&](int64_t part, int) {
    const size_t first = starts[static_cast<size_t>(part)];
    const size_t count = starts[static_cast<size_t>(part) + 1] - first;
    if (count == 0) return;
    if (low > 0) sort(spare + first, entries + first, count, low);
    std::memcpy(entries + first, spare + first, count * sizeof(Entry));
  });
}

}  // namespace

Plan::Plan(std::vector<Table> tables, std::vector<Piece> pieces, int threads)
    : tables_(std::move(tables)),
      pieces_(std::move(pieces)),
      asked_threads_(threads),
      kernel_(RECAST_CHOOSE(kernel)) {
  int64_t floats = 0;
  for (const Table& table : tables_)
    for (size_t p = table.first_piece; p < table.last_piece; ++p)
      floats += pieces_[p].n_ids * table.dim;
  threads_ = floats < kWorthThreads ? 1 : std::max(threads, 1);
  sort_all();
  cut();
}

// Whether entries can name bags directly: the table has one piece, whose ids all have one factor.
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
  // All tables that one thread sorts share its spare memory, so that it stays in the cache.
  std::vector<size_t> small;
  size_t largest = 0, largest_small = 0, sum = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    largest = std::max(largest, sorted_[t].n);
    if (threads_ > 1 && sorted_[t].n >= kBigSort) continue;
    small.push_back(t);
    largest_small = std::max(largest_small, sorted_[t].n);
  }
  const size_t room = std::max(largest, largest_small * static_cast<size_t>(threads_));
  memory_ = Scratch::take(n_sources * sizeof(Source) + (n + room) * sizeof(Entry));
  auto* sources = static_cast<Source*>(memory_.get());
  auto* entries = reinterpret_cast<Entry*>(sources + n_sources);
  Entry* const spare = entries + n;
  for (size_t t = 0; t < tables_.size(); ++t) {
    Sorted& sorted = sorted_[t];
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
  const auto sort_one = [&](size_t t, int threads, Entry* spare) {
    const Table& table = tables_[t];
    Sorted& sorted = sorted_[t];
    const int bits = bits_of(static_cast<uint64_t>(table.rows));
    const auto none = [&](const Entry& entry) { return entry.row < table.rows; };
    const auto count = [&] {
      sorted.valid = static_cast<size_t>(
          std::partition_point(sorted.entries, sorted.entries + sorted.n, none) - sorted.entries);
    };
    const Piece& first = pieces_[table.first_piece];
    if (threads == 1 && sorted.sources == nullptr && sorted.n > kFewEntries && is_even(first)) {
      const auto from_ids = first.wide_ids ? sort_ids<int64_t> : sort_ids<int32_t>;
      from_ids(first, t, table.rows, sorted.entries, spare, bits, fault);
      if (!fault.found()) count();
      return;
    }
    size_t base = 0;
    for (size_t p = table.first_piece; p < table.last_piece; ++p) {
      const Piece& piece = pieces_[p];
      Entry* const to = sorted.entries + base;
      Source* const from = sorted.sources == nullptr ? nullptr : sorted.sources + base;
      const auto ignore = [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) to[i] = {static_cast<uint32_t>(table.rows), 0};
      };
      ignore(0, std::clamp<int64_t>(bag_start(piece, 0), 0, piece.n_ids));  // of no bags: all
      ignore(std::clamp<int64_t>(bag_start(piece, piece.n_bags), 0, piece.n_ids), piece.n_ids);
      const int64_t blocks = threads;
      parallel_static(threads, blocks, [&](int64_t block, int) {
        build(piece, t, table.rows, piece.n_bags * block / blocks,
              piece.n_bags * (block + 1) / blocks, to, from, static_cast<uint32_t>(base), fault);
      });
      base += static_cast<size_t>(piece.n_ids);
    }
    if (fault.found()) return;  // other tables are still read, for the first fault of all
    if (!is_sorted(sorted.entries, sorted.n)) {
      if (threads > 1)
        sort_big(sorted.entries, spare, sorted.n, bits, threads);
      else
        sort(sorted.entries, spare, sorted.n, bits);
    }
    count();
  };

  if (threads_ > 1)
    for (size_t t = 0; t < tables_.size(); ++t)
      if (sorted_[t].n >= kBigSort) sort_one(t, threads_, spare);
  parallel_dynamic(threads_, static_cast<int64_t>(small.size()), [&](int64_t i, int thread) {
    sort_one(small[static_cast<size_t>(i)], 1, spare + static_cast<size_t>(thread) * largest_small);
  });
  fault.check();
}

// Cuts the entries into tasks: runs of whole rows with about equally many gradients.
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
  parallel_dynamic(threads_, static_cast<int64_t>(tasks_.size()), [&](int64_t i, int) {
    const Task& task = tasks_[static_cast<size_t>(i)];
    const Entry* entries = sorted_[task.table].entries;
    int64_t found = 0;
    for (size_t e = task.first; e < task.last; ++e)
      found += e == task.first || entries[e].row != entries[e - 1].row;
    rows[static_cast<size_t>(i)] = found;
  });
  counts_.assign(tables_.size(), 0);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    tasks_[i].rows_before = counts_[tasks_[i].table];
    counts_[tasks_[i].table] += rows[i];
  }
  return counts_;
}

// The entries [first, last) of a table.
Run Plan::run_of(size_t table, size_t first, size_t last, float* buffer) const {
  const Sorted& sorted = sorted_[table];
  const Table& of = tables_[table];
  const Piece& piece = pieces_[of.first_piece];
  Entry* const entries = sorted.entries;
  return {entries + first, entries + last, entries + sorted.valid,
          sorted.sources,  piece.gradient, piece.stride,
          sorted.factor,   of.dim,         buffer,
          of.half,         of.narrow};
}

void Plan::run(const std::vector<Target>& targets) {
  if (targets.size() != tables_.size()) throw std::invalid_argument("one target for each table");
  for (const Target& target : targets)
    if (target.action == Action::store) counts();
  // All memory is there before the first row changes: a step is done whole, or not at all.
  int64_t widest = 0;
  for (size_t t = 0; t < targets.size(); ++t)
    if (targets[t].action == Action::row_wise_adagrad) widest = std::max(widest, tables_[t].dim);
  // Threads that share a cache line wait for each other, and lines are fetched in pairs.
  constexpr int64_t kPair = 128 / sizeof(float);
  const int64_t room = (widest + kPair - 1) / kPair * kPair;
  std::vector<float> memory(widest == 0 ? 0 : static_cast<size_t>(room * threads_ + kPair));
  const auto address = reinterpret_cast<uintptr_t>(memory.data()) / sizeof(float);
  float* const buffers = memory.data() + (kPair - static_cast<int64_t>(address % kPair)) % kPair;
  Whole whole = prepare_whole(targets);
  parallel_dynamic(threads_, static_cast<int64_t>(tasks_.size()), [&](int64_t i, int thread) {
    const Task& task = tasks_[static_cast<size_t>(i)];
    Target target = targets[task.table];
    if (target.whole) return;
    if (target.action == Action::store) {
      target.ids += task.rows_before;
      target.weight += task.rows_before * target.stride * (target.narrow ? 2 : 4);
    }
    const bool row_wise = target.action == Action::row_wise_adagrad;
    float* const buffer = row_wise ? buffers + thread * room : nullptr;
    kernel_(run_of(task.table, task.first, task.last, buffer), target);
  });
  step_whole(targets, whole);
  sweep(tables_, targets, asked_threads_);
}

}  // namespace recast::rows
