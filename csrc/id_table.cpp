// Finding ids and giving them rows.
#include "id_table.h"

#include <algorithm>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.h"
#include "parallel.h"

namespace recast::ids {
namespace {
constexpr int64_t kAhead = 64;  // ids whose cache lines are fetched together
}
}  // namespace recast::ids

#define RECAST_KERNEL "id_table_kernel.h"
#include "each_isa.h"

namespace recast::ids {
namespace {

constexpr int64_t kBlock = 512;  // ids that are found, then noted

}  // namespace

IdTable::IdTable(const Settings& settings)
    : settings_(settings),
      stamps_(static_cast<size_t>(settings.capacity) + 1),
      scores_(is_scored(settings.evict) ? static_cast<size_t>(settings.capacity) + 1 : 0),
      row_ids_(static_cast<size_t>(settings.capacity) + 1) {
  stamps_[kPadding] = kFree;
  rebuild(16);
}

// ---------------------------------------------------------------- the map

uint64_t IdTable::home(int64_t id) const { return mixed(id) & mask_; }

// Three quarters of the slots.
int64_t IdTable::most_in(size_t buckets) { return static_cast<int64_t>(buckets) * kSlots * 3 / 4; }

inline void IdTable::place(int64_t id, uint64_t hash, uint32_t row) {
  for (uint64_t at = hash & mask_;; at = (at + 1) & mask_) {
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

inline uint32_t IdTable::row_at(int64_t id, uint64_t at) const {
  while (true) {
    const Bucket& bucket = buckets_[at];
    uint32_t found = 0;  // without branches: at most one slot fits
    for (int k = 0; k < kSlots; ++k)
      found |= bucket.rows[k] & -static_cast<uint32_t>(bucket.ids[k] == id);
    if (found != kPadding || bucket.past == 0) return found;
    at = (at + 1) & mask_;
  }
}

uint32_t* IdTable::slot(int64_t id) {
  for (uint64_t at = home(id);; at = (at + 1) & mask_) {
    Bucket& bucket = buckets_[at];
    unsigned here = 0;  // the slot of an id cannot be predicted: no branches
    for (int k = 0; k < kSlots; ++k)
      here |= static_cast<unsigned>((bucket.ids[k] == id) & (bucket.rows[k] != kPadding)) << k;
    if (here != 0) return &bucket.rows[__builtin_ctz(here)];
    if (bucket.past == 0) return nullptr;
  }
}

void IdTable::put(int64_t id, uint64_t hash, uint32_t row) {
  if (used_ == most_used_) grow(0);
  ++used_;
  place(id, hash, row);
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

// Makes four times as many buckets, as growing moves every id; more if that many ids are expected,
// or if all rows need little more.
void IdTable::grow(int64_t expected) {
  size_t buckets = buckets_.size() * 2;
  while (most_in(buckets) < settings_.capacity &&
         (buckets < buckets_.size() * 4 || most_in(buckets * 2) >= settings_.capacity ||
          most_in(buckets) < used_ + expected))
    buckets *= 2;
  rebuild(buckets);
}

void IdTable::rebuild(size_t buckets) {
  Reserved<Bucket> old(buckets);
  old.clear();
  old.swap(buckets_);
  mask_ = buckets - 1;
  most_used_ = most_in(buckets);
  // An old bucket goes to a few new ones, next to those of the bucket before: no random access.
  for (const Bucket& bucket : old)
    for (int k = 0; k < kSlots; ++k)
      if (bucket.rows[k] != kPadding) place(bucket.ids[k], mixed(bucket.ids[k]), bucket.rows[k]);
}

// ---------------------------------------------------------------- finding

void IdTable::rows_of(const int64_t* ids, int64_t n, int64_t* rows, int threads) const {
  if (n < kWorthThreads) threads = 1;
  const auto kernel = RECAST_CHOOSE(find);
  const int64_t parts = threads > 1 ? threads : 1;
  parallel_static(threads, parts, [&](int64_t part, int) {
    const int64_t first = n * part / parts, last = n * (part + 1) / parts;
    kernel(buckets_.data(), mask_, ids + first, last - first, rows + first);
  });
  if (settings_.ttl > 0)
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] != kAbsent && !is_guest(rows[i]) && has_expired(rows[i])) rows[i] = kAbsent;
}

void IdTable::find(const int64_t* ids, int64_t n, int64_t* rows, int threads) const {
  std::shared_lock lock(mutex_);
  rows_of(ids, n, rows, threads);
  if (guest_ids_.empty()) return;
  for (int64_t i = 0; i < n; ++i)
    if (is_guest(rows[i])) rows[i] = kAbsent;
}

// ---------------------------------------------------------------- giving rows

void IdTable::find_or_insert(const int64_t* ids, int64_t n, const int64_t* scores, int64_t* rows,
                             int threads) {
  std::unique_lock lock(mutex_);
  const bool has_room = scores == nullptr && settings_.ttl == 0 && settings_.admit <= 1 &&
                        guest_ids_.empty() && free_.empty() && size_ + n <= settings_.capacity;
  if (has_room) {
    // One thread assigns rows, in order; the others only help to find ids that have rows already.
    const int64_t done = find_or_put(ids, n, rows, threads > 1 && n >= kWorthThreads);
    ids += done, rows += done, n -= done;
    if (n == 0) return;
  }
  rows_of(ids, n, rows, threads);
  std::vector<int64_t> missing;
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] == kAbsent || is_guest(rows[i])) missing.push_back(i);
  const auto misses = static_cast<int64_t>(missing.size());
  counters_.hits += n - misses;
  looked_up_ += n - misses;
  if (has_room) {
    put_missing(ids, missing, rows);
  } else if (misses > 0) {
    counters_.misses += misses;
    looked_up_ += misses;
    // Ids that were found may not be evicted for those that were not.
    for (int64_t i = 0; i < n; ++i)
      if (rows[i] != kAbsent && !is_guest(rows[i])) stamps_[rows[i]] = now();
    insert_missing(ids, scores, missing, rows);
  }
  touch(rows, n, scores, threads);
}

// Finds ids and inserts missing ones, in a table where none has to be evicted. Returns how many ids
// were done: with `while_new` it stops after a block of mostly known ids.
int64_t IdTable::find_or_put(const int64_t* ids, int64_t n, int64_t* rows, bool while_new) {
  const auto kernel = RECAST_CHOOSE(find);
  const int64_t first_new = n_rows_;
  bool mostly_new = false;  // the last block was: then searching first gains nothing
  int64_t misses = 0, done = 0;
  for (int64_t at = 0; at < n && (at == 0 || mostly_new || !while_new); at = done) {
    const int64_t size = std::min(kBlock, n - at), before = n_rows_;
    int64_t absent = size;
    if (mostly_new) {
      std::fill_n(rows + at, size, kAbsent);
    } else {
      absent = kernel(buckets_.data(), mask_, ids + at, size, rows + at);
    }
    if (absent > 0) {
      // Assumes the same share of new ids as so far.
      const int64_t expected = (n - at) * (n_rows_ - first_new + absent) / (at + size);
      if (before == first_new) fresh_.reserve(fresh_.size() + static_cast<size_t>(n - at));
      put_new(ids + at, size, expected, rows + at);
    }
    mostly_new = 2 * (n_rows_ - before) > size;
    if (n_rows_ > first_new)
      for (int64_t i = at; i < at + size; ++i) misses += rows[i] >= first_new;
    touch(rows + at, size, nullptr, 1);
    done = at + size;
  }
  const int64_t added = n_rows_ - first_new;
  counters_.inserted += added;
  counters_.misses += misses, counters_.hits += done - misses;
  looked_up_ += done;
  return done;
}

// Inserts the ids that have no row; `expected`: how many new ids are still to come.
void IdTable::put_new(const int64_t* ids, int64_t n, int64_t expected, int64_t* rows) {
  constexpr int64_t kFetch = 32;
  uint64_t hashes[kFetch];  // a ring
  const auto fetch = [&](int64_t i) {
    hashes[i % kFetch] = mixed(ids[i]);
    __builtin_prefetch(buckets_.data() + (hashes[i % kFetch] & mask_), 1);
  };
  for (int64_t i = 0; i < std::min(kFetch, n); ++i) fetch(i);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = hashes[i % kFetch];
    if (i + kFetch < n) fetch(i + kFetch);
    if (rows[i] != kAbsent) continue;
    const int64_t id = ids[i];
    uint32_t row = row_at(id, hash & mask_);
    if (row == kPadding) {
      if (used_ == most_used_) grow(expected);
      row = static_cast<uint32_t>(n_rows_++);
      ++used_, ++size_;  // with the row: memory may end at the next id
      place(id, hash, row);
      set_row(row, id, 0, step_);
      fresh_.push_back({id, row});
    }
    rows[i] = row;
  }
}

// The same for the ids that the threads did not find.
void IdTable::put_missing(const int64_t* ids, const std::vector<int64_t>& missing, int64_t* rows) {
  const size_t n = missing.size();
  std::vector<int64_t> own(n), found(n);
  for (size_t k = 0; k < n; ++k) own[k] = ids[missing[k]];
  find_or_put(own.data(), static_cast<int64_t>(n), found.data(), false);
  for (size_t k = 0; k < n; ++k) rows[missing[k]] = found[k];
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
        stamps_[fresh_[k].row] = kFree;
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
      if (!has_expired(row)) return row;
      forget(row);
      ++counters_.expired;
    } else {
      const size_t guest = static_cast<size_t>(row - settings_.capacity - 1);
      if (guest >= first_guest || !is_admitted(id)) return row;
      const uint32_t found = free_row(id, score);
      if (found == kPadding) return row;
      remove(id);  // the guest's row stays as it is until the next step
      put(id, mixed(id), found);
      return found;
    }
  }
  const uint32_t row = is_admitted(id) ? free_row(id, score) : kPadding;
  if (row == kPadding) return guest_row(id);
  put(id, mixed(id), row);
  return row;
}

// A row for a new id, taken from another if necessary; kPadding when the id is to be a guest.
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
    row = static_cast<uint32_t>(n_rows_++);
  } else if (settings_.evict == Evict::never) {
    throw Full{id, false};
  } else {
    row = lowest();
    if (row != kPadding && settings_.evict == Evict::given && in_order(score) < scores_[row]) {
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
  set_row(row, id, settings_.evict == Evict::given ? in_order(score) : 0, step_);
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
  put(id, mixed(id), row);
  return row;
}

void IdTable::forget(uint32_t row) {
  remove(row_ids_[row]);
  gone_.push_back({row_ids_[row], row});
  stamps_[row] = kFree;
  free_.push_back(row);
  --size_;
}

}  // namespace recast::ids
