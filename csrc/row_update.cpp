#include "row_update.h"

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

// Room for one row, of this thread.
float* row_buffer(size_t dim) {
  thread_local std::vector<float> buffer;
  if (buffer.size() < dim) buffer.resize(dim);
  return buffer.data();
}

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
    throw BadId{table_, id_};
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

void Plan::run(const std::vector<Target>& targets) {
  if (targets.size() != tables_.size()) throw std::invalid_argument("one target for each table");
  for (const Target& target : targets)
    if (target.action == Action::store) counts();
#pragma omp parallel for num_threads(threads_) schedule(dynamic, 1) if (threads_ > 1)
  for (size_t i = 0; i < tasks_.size(); ++i) {
    const Task& task = tasks_[i];
    const Sorted& sorted = sorted_[task.table];
    const Table& table = tables_[task.table];
    const Piece& piece = pieces_[table.first_piece];
    Target target = targets[task.table];
    if (target.action == Action::store) {
      target.ids += task.rows_before;
      target.weight += task.rows_before * target.stride * (target.narrow ? 2 : 4);
    }
    const bool row_wise = target.action == Action::row_wise_adagrad;
    float* const buffer = row_wise ? row_buffer(static_cast<size_t>(table.dim)) : nullptr;
    kernel_({sorted.entries + task.first, sorted.entries + task.last, sorted.entries + sorted.valid,
             sorted.sources, piece.gradient, piece.stride, sorted.factor, table.dim, buffer,
             table.half, table.narrow},
            target);
  }
}

}  // namespace recast::rows
