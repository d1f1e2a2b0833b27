// Finding ids and giving them rows.
#include "id_table.h"

#include <algorithm>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace recast::ids {
namespace {

constexpr int64_t kAhead = 32;           // ids whose cache lines are fetched together
constexpr int64_t kWorthThreads = 4096;  // ids below which a second thread costs more

uint64_t in_epoch(int64_t epoch, uint64_t low) {
  return (static_cast<uint64_t>(epoch) << 32) | std::min<uint64_t>(low, 0xffffffffull);
}

}  // namespace

void* big_pages(size_t bytes) {
  constexpr size_t kBig = size_t{1} << 21, kLine = 64;
  const size_t unit = bytes < 2 * kBig ? kLine : kBig;
  void* memory = std::aligned_alloc(unit, (std::max<size_t>(bytes, 1) + unit - 1) / unit * unit);
  if (memory == nullptr) throw std::bad_alloc();
#if defined(__linux__)
  if (unit == kBig) madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  return memory;
}

IdTable::IdTable(const Settings& settings) : settings_(settings) { rebuild(16); }

// ---------------------------------------------------------------- the map

uint64_t IdTable::home(int64_t id) const { return mixed(id) & mask_; }

uint32_t* IdTable::slot(int64_t id) {
  for (uint64_t at = home(id);; at = (at + 1) & mask_) {
    Bucket& bucket = buckets_[at];
    unsigned here = 0;  // where an id is in its bucket cannot be foreseen: no branches
    for (int k = 0; k < kSlots; ++k)
      here |= static_cast<unsigned>((bucket.ids[k] == id) & (bucket.rows[k] != kPadding)) << k;
    if (here != 0) return &bucket.rows[__builtin_ctz(here)];
    if (bucket.past == 0) return nullptr;
  }
}

void IdTable::put(int64_t id, uint32_t row) {
  if (++used_ * 4 > static_cast<int64_t>(buckets_.size()) * kSlots * 3) grow();
  for (uint64_t at = home(id);; at = (at + 1) & mask_) {
    Bucket& bucket = buckets_[at];
    unsigned open = 0;
    for (int k = 0; k < kSlots; ++k) open |= static_cast<unsigned>(bucket.rows[k] == kPadding) << k;
    if (open != 0) {
      const int k = __builtin_ctz(open);
      bucket.ids[k] = id;
      bucket.rows[k] = row;
      return;
    }
    ++bucket.past;
  }
}

void IdTable::remove(int64_t id) {
  for (uint64_t at = home(id);; at = (at + 1) & mask_) {
    Bucket& bucket = buckets_[at];
    for (int k = 0; k < kSlots; ++k) {
      if (bucket.ids[k] != id || bucket.rows[k] == kPadding) continue;
      bucket.rows[k] = kPadding;
      --used_;
      return;
    }
    --bucket.past;
  }
}

// Four times the buckets, as every id moves; but not many more than all rows need.
void IdTable::grow() {
  const auto enough = static_cast<size_t>(settings_.capacity / (kSlots / 2));
  rebuild(buckets_.size() * (buckets_.size() * 2 < enough ? 4 : 2));
}

void IdTable::rebuild(size_t buckets) {
  std::vector<Bucket, BigPages<Bucket>> old(buckets, Bucket{});
  old.swap(buckets_);
  mask_ = buckets - 1;
  const int64_t used = used_;
  for (const Bucket& bucket : old)
    for (int k = 0; k < kSlots; ++k)
      if (bucket.rows[k] != kPadding) {
        used_ = 0;  // `put` is not to rebuild once more
        put(bucket.ids[k], bucket.rows[k]);
      }
  used_ = used;
}

bool IdTable::has_expired(const Row& row) const {
  return settings_.ttl > 0 && row.stamp + settings_.ttl < step_;
}

void IdTable::rows_of(const int64_t* ids, int64_t n, int64_t* rows, int threads) const {
  if (n < kWorthThreads) threads = 1;
  const Bucket* buckets = buckets_.data();
  const int64_t parts = threads > 1 ? threads : 1;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = n * part / parts, last = n * (part + 1) / parts;
    uint64_t homes[kAhead];  // a ring
    const auto fetch = [&](int64_t i) {
      homes[i % kAhead] = home(ids[i]);
      __builtin_prefetch(buckets + homes[i % kAhead]);
    };
    for (int64_t i = first; i < std::min(first + kAhead, last); ++i) fetch(i);
    for (int64_t i = first; i < last; ++i) {
      const int64_t id = ids[i];
      uint64_t at = homes[i % kAhead];
      if (i + kAhead < last) fetch(i + kAhead);
      uint32_t found = 0;
      while (true) {
        const Bucket& bucket = buckets[at];
        // Without branches: at most one slot fits.
        for (int k = 0; k < kSlots; ++k)
          found |= bucket.rows[k] & -static_cast<uint32_t>(bucket.ids[k] == id);
        if (found != kPadding || bucket.past == 0) break;
        at = (at + 1) & mask_;
      }
      rows[i] = found == kPadding ? kAbsent : found;
    }
  }
  if (settings_.ttl > 0)
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] != kAbsent && !is_guest(rows[i]) && has_expired(rows_[rows[i]]))
        rows[i] = kAbsent;
}

void IdTable::find(const int64_t* ids, int64_t n, int64_t* rows, int threads) const {
  std::shared_lock lock(mutex_);
  rows_of(ids, n, rows, threads);
  for (int64_t i = 0; i < n; ++i)
    if (is_guest(rows[i])) rows[i] = kAbsent;
}

// ---------------------------------------------------------------- giving rows

void IdTable::find_or_insert(const int64_t* ids, int64_t n, const int64_t* scores, int64_t* rows,
                             int threads) {
  std::unique_lock lock(mutex_);
  rows_of(ids, n, rows, threads);
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] == kAbsent || is_guest(rows[i])) missing.push_back(i);
  counters_.misses += static_cast<int64_t>(missing.size());
  counters_.hits += n - static_cast<int64_t>(missing.size());
  looked_up_ += n;
  if (!missing.empty()) {
    // What is found may not be evicted for what is not.
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] != kAbsent && !is_guest(rows[i])) rows_[rows[i]].stamp = step_;
    insert_missing(ids, scores, missing, rows);
  }
  touch(rows, n, scores, threads);
}

void IdTable::insert_missing(const int64_t* ids, const int64_t* scores,
                             const std::vector<int64_t>& missing, int64_t* rows) {
  if (settings_.admit > 1)
    for (const int64_t i : missing) count(ids[i]);
  std::vector<int64_t> sorted;
  const std::vector<int64_t>* order = &missing;
  if (scores != nullptr) {  // the best first: those after it may find no row to take
    sorted = missing;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    order = &sorted;
  }
  const size_t first_fresh = fresh_.size(), first_guest = guest_ids_.size();
  constexpr size_t kFetch = 12;
  try {
    for (size_t k = 0; k < order->size(); ++k) {
      if (k + kFetch < order->size())
        __builtin_prefetch(buckets_.data() + home(ids[(*order)[k + kFetch]]));
      const int64_t i = (*order)[k];
      rows[i] = give(ids[i], scores == nullptr ? 0 : scores[i], first_guest);
    }
  } catch (const Full&) {
    for (size_t k = first_fresh; k < fresh_.size(); ++k)
      if (!is_guest(fresh_[k].row)) {
        remove(fresh_[k].id);
        rows_[fresh_[k].row].stamp = -1;
        free_.push_back(fresh_[k].row);
        --size_, --counters_.inserted;
      }
    fresh_.resize(first_fresh);
    throw;
  }
}

uint32_t IdTable::give(int64_t id, int64_t score, size_t first_guest) {
  if (uint32_t* known = slot(id)) {
    const uint32_t row = *known;
    if (!is_guest(row)) {
      if (!has_expired(rows_[row])) return row;
      forget(row);
      ++counters_.expired;
    } else {
      const size_t guest = static_cast<size_t>(row - settings_.capacity - 1);
      if (guest >= first_guest || !is_admitted(id)) return row;
      const uint32_t found = free_row(id, score);
      if (found == kPadding) return row;
      remove(id);  // the guest's row stays as it is until the next step
      put(id, found);
      return found;
    }
  }
  const uint32_t row = is_admitted(id) ? free_row(id, score) : kPadding;
  if (row == kPadding) return guest_row(id);
  put(id, row);
  return row;
}

// A row for a new id, taken from another where need be; kPadding when the id is to be a guest.
uint32_t IdTable::free_row(int64_t id, int64_t score) {
  uint32_t row = kPadding;
  if (free_.empty() && size_ == settings_.capacity && settings_.ttl > 0 && all_swept_ != step_) {
    all_swept_ = step_;
    sweep(settings_.capacity);
  }
  if (!free_.empty()) {
    row = free_.back();
    free_.pop_back();
  } else if (size_ < settings_.capacity) {
    if (rows_.empty()) rows_.push_back({0, 0, -1});
    row = static_cast<uint32_t>(rows_.size());
    rows_.push_back({0, 0, -1});
  } else if (settings_.evict == Evict::never) {
    throw Full{id, false};
  } else {
    row = lowest();
    if (row != kPadding && settings_.evict == Evict::given && in_order(score) < rows_[row].score) {
      late_.push_back(rank(row));
      std::push_heap(late_.begin(), late_.end(), std::greater<Rank>());
      row = kPadding;
    }
    if (row == kPadding) {
      ++counters_.refused;
      return kPadding;
    }
    forget(row);
    free_.pop_back();
    ++counters_.evicted;
  }
  rows_[row] = {id, settings_.evict == Evict::given ? in_order(score) : 0, step_};
  fresh_.push_back({id, row});
  ++size_, ++counters_.inserted;
  if (settings_.admit > 1) drop_candidate(id);
  return row;
}

uint32_t IdTable::guest_row(int64_t id) {
  if (static_cast<int64_t>(guest_ids_.size()) >= settings_.guests) throw Full{id, true};
  guest_ids_.push_back(id);
  const uint32_t row = static_cast<uint32_t>(settings_.capacity + guest_ids_.size());
  fresh_.push_back({id, row});
  put(id, row);
  return row;
}

void IdTable::forget(uint32_t row) {
  remove(rows_[row].id);
  gone_.push_back({rows_[row].id, row});
  rows_[row].stamp = -1;
  free_.push_back(row);
  --size_;
}

void IdTable::touch(const int64_t* rows, int64_t n, const int64_t* scores, int threads) {
  const Evict evict = settings_.evict;
  const bool ordered = evict == Evict::given || evict == Evict::epoch_lfu;
  if (n < kWorthThreads || ordered) threads = 1;
  const auto last = static_cast<uint64_t>(step_);
  const uint64_t lru = evict == Evict::lru ? last : in_epoch(epoch_, last);
  Row* table = rows_.data();
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && !is_guest(rows[i + kAhead]))
      __builtin_prefetch(table + rows[i + kAhead], 1);
    if (is_guest(rows[i])) continue;
    Row& row = table[rows[i]];
    __atomic_store_n(&row.stamp, step_, __ATOMIC_RELAXED);
    switch (evict) {
      case Evict::lru:
      case Evict::epoch_lru:
        __atomic_store_n(&row.score, lru, __ATOMIC_RELAXED);
        break;
      case Evict::lfu:
        __atomic_fetch_add(&row.score, 1, __ATOMIC_RELAXED);
        break;
      case Evict::epoch_lfu:
        row.score = in_epoch(epoch_, (row.score & 0xffffffffull) + 1);
        break;
      case Evict::given:
        row.score = in_order(scores[i]);
        break;
      case Evict::never:
        break;
    }
  }
  note_low(rows, n);
}

// Rows whose rank changed, where it is below those that wait to be evicted.
void IdTable::note_low(const int64_t* rows, int64_t n) {
  if (bar_ == Rank{0, 0, 0}) return;
  for (int64_t i = 0; i < n; ++i) {
    if (is_guest(rows[i])) continue;
    const Rank now = rank(static_cast<uint32_t>(rows[i]));
    if (!(now < bar_)) continue;
    late_.push_back(now);
    std::push_heap(late_.begin(), late_.end(), std::greater<Rank>());
  }
  if (static_cast<int64_t>(late_.size()) > size_ / 2 + (1 << 16)) {
    queue_.clear(), late_.clear(), held_.clear();
    bar_ = {0, 0, 0};
  }
}

}  // namespace recast::ids
