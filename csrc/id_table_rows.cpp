// What is stored about a row in use: its id, the step of its last lookup, and its score.
#include <algorithm>
#include <functional>

#include "id_table.h"
#include "parallel.h"

namespace recast::ids {
namespace {

constexpr int64_t kAhead = 64;  // scores whose cache lines are fetched together

uint64_t in_epoch(int64_t epoch, uint64_t low) {
  return (static_cast<uint64_t>(epoch) << 32) | std::min<uint64_t>(low, 0xffffffffull);
}

}  // namespace

uint64_t IdTable::score(int64_t row) const {
  if (is_scored(settings_.evict)) return scores_[row];
  return settings_.evict == Evict::lru ? static_cast<uint64_t>(stamp(row)) : 0;
}

int64_t IdTable::told_score(int64_t row) const {
  return settings_.evict == Evict::given ? as_given(scores_[row])
                                         : static_cast<int64_t>(score(row));
}

uint64_t IdTable::kept_score(int64_t told) const {
  return settings_.evict == Evict::given ? in_order(told) : static_cast<uint64_t>(told);
}

size_t IdTable::row_bytes() const {
  return sizeof(uint32_t) + sizeof(int64_t) + (is_scored(settings_.evict) ? sizeof(uint64_t) : 0);
}

void IdTable::set_row(int64_t row, int64_t id, uint64_t score, int64_t stamp) {
  row_ids_[row] = id;
  stamps_[row] = static_cast<uint32_t>(std::clamp<int64_t>(stamp - zero_, 1, kMostSteps));
  if (is_scored(settings_.evict)) scores_[row] = score;
}

bool IdTable::has_expired(int64_t row) const {
  return settings_.ttl > 0 && stamp(row) + settings_.ttl < step_;
}

// Moves `zero_` up before stamps overflow their 32 bits. Rows whose last lookup was before it then
// count as looked up right after it.
void IdTable::keep_range() {
  if (step_ > zero_ && step_ - zero_ <= kMostSteps) return;
  const int64_t zero = std::min(step_ - 1, std::max<int64_t>(0, step_ - kMostSteps / 2));
  for (int64_t row = 1; row < n_rows_; ++row)
    if (!is_free(row))
      stamps_[row] = static_cast<uint32_t>(std::clamp<int64_t>(stamp(row) - zero, 1, kMostSteps));
  zero_ = zero;
  queue_.clear(), late_.clear(), held_.clear();
  bar_ = {};
}

void IdTable::touch(const int64_t* rows, int64_t n, const int64_t* scores, int threads) {
  const bool ordered = settings_.evict == Evict::given || settings_.evict == Evict::epoch_lfu;
  if (threads <= 1 || n < kWorthThreads || ordered) {
    note(rows, n, scores);
  } else {
    parallel_static(threads, threads, [&](int64_t part, int) {
      const int64_t first = n * part / threads;
      note(rows + first, n * (part + 1) / threads - first, nullptr);
    });
  }
  note_low(rows, n);
}

// Records that rows were looked up; several threads may do so at once.
void IdTable::note(const int64_t* rows, int64_t n, const int64_t* scores) {
  const uint64_t recent = in_epoch(epoch_, static_cast<uint64_t>(step_));
  const uint32_t stamp = now();
  const int64_t most = settings_.capacity;  // rows above it are guests'
  uint32_t* stamps = stamps_.data();
  uint64_t* known = scores_.data();
  for (int64_t i = 0; i < n; ++i)
    if (rows[i] <= most) __atomic_store_n(stamps + rows[i], stamp, __ATOMIC_RELAXED);
  if (!is_scored(settings_.evict)) return;
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && rows[i + kAhead] <= most) __builtin_prefetch(known + rows[i + kAhead], 1);
    if (rows[i] > most) continue;
    uint64_t* score = known + rows[i];
    switch (settings_.evict) {
      case Evict::epoch_lru:
        __atomic_store_n(score, recent, __ATOMIC_RELAXED);
        break;
      case Evict::lfu:
        __atomic_fetch_add(score, 1, __ATOMIC_RELAXED);
        break;
      case Evict::epoch_lfu:
        *score = in_epoch(epoch_, (*score & 0xffffffffull) + 1);
        break;
      default:
        *score = in_order(scores[i]);
    }
  }
}

// Records rows whose new rank is below `bar_`, so that the queue lacks them.
void IdTable::note_low(const int64_t* rows, int64_t n) {
  if (bar_ == Rank{}) return;
  for (int64_t i = 0; i < n; ++i) {
    if (is_guest(rows[i]) || score(rows[i]) > bar_.score) continue;
    const Rank now = rank(static_cast<uint32_t>(rows[i]));
    if (!(now < bar_)) continue;
    late_.push_back(now);
    std::push_heap(late_.begin(), late_.end(), std::greater<Rank>());
  }
  if (static_cast<int64_t>(late_.size()) > size_ / 2 + (1 << 16)) {
    queue_.clear(), late_.clear(), held_.clear();
    bar_ = {};
  }
}

}  // namespace recast::ids
