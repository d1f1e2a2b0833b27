// Which id is evicted, and which ids wait until they are admitted.
#include <algorithm>
#include <iterator>
#include <limits>
#include <mutex>

#include "id_table.h"

namespace recast::ids {
namespace {

constexpr int64_t kSamplesToAge = 10;  // lookups per stored row until counts are halved
constexpr int64_t kLeastCandidates = 1 << 16;

}  // namespace

// ---------------------------------------------------------------- which row is evicted

bool IdTable::next(Rank& out) {
  if (queue_.empty() && late_.empty()) return false;
  if (late_.empty() || (!queue_.empty() && queue_.back() < late_.front())) {
    out = queue_.back();
    queue_.pop_back();
    return true;
  }
  out = late_.front();
  std::pop_heap(late_.begin(), late_.end(), std::greater<Rank>());
  late_.pop_back();
  return true;
}

uint32_t IdTable::lowest() {
  if (all_pinned_ == step_) return kPadding;
  while (true) {
    Rank found;
    while (next(found)) {
      if (is_pinned(found.row)) {
        held_.push_back(rank(found.row));
      } else if (rank(found.row) == found) {
        return found.row;
      }
    }
    scan();
    if (queue_.empty()) {
      all_pinned_ = step_;
      return kPadding;
    }
  }
}

// Rebuilds the queue from the lowest eighth of the rows.
void IdTable::scan() {
  std::vector<Rank> ranks;
  ranks.reserve(static_cast<size_t>(size_));
  for (int64_t row = 1; row < n_rows_; ++row)
    if (!is_free(row)) ranks.push_back(rank(static_cast<uint32_t>(row)));
  const size_t wanted = std::min(ranks.size(), std::max<size_t>(1024, ranks.size() / 8));
  queue_.clear(), late_.clear(), held_.clear();
  bar_ = {std::numeric_limits<uint64_t>::max(), std::numeric_limits<int64_t>::max(), 0xffffffffu,
          kPadding};
  const auto is_pinned = [&](const Rank& r) { return r.stamp == now(); };
  const auto pinned =
      std::partition(ranks.begin(), ranks.end(), [&](const Rank& r) { return !is_pinned(r); });
  const size_t open = static_cast<size_t>(pinned - ranks.begin());
  if (open > wanted) {
    std::nth_element(ranks.begin(), ranks.begin() + static_cast<int64_t>(wanted), pinned);
    bar_ = ranks[wanted];
  }
  queue_.assign(ranks.begin(), ranks.begin() + static_cast<int64_t>(std::min(open, wanted)));
  std::sort(queue_.begin(), queue_.end(), std::greater<Rank>());
  std::copy_if(pinned, ranks.end(), std::back_inserter(held_),
               [&](const Rank& r) { return r < bar_; });
}

// Halves all counts, so that lookups of long ago weigh less.
void IdTable::age() {
  for (int64_t row = 1; row < n_rows_; ++row) scores_[row] >>= 1;
  queue_.clear(), late_.clear(), held_.clear();
  bar_ = {};
  looked_up_ = 0;
}

// Forgets expired ids among the next `rows` rows, going round the table.
void IdTable::sweep(int64_t rows) {
  const int64_t end = n_rows_;
  for (int64_t k = 0; k < rows && end > 1; ++k, ++swept_) {
    if (swept_ >= end) swept_ = 1;
    if (is_free(swept_) || !has_expired(swept_)) continue;
    forget(static_cast<uint32_t>(swept_));
    ++counters_.expired;
  }
}

void IdTable::advance() {
  std::unique_lock lock(mutex_);
  for (size_t k = 0; k < guest_ids_.size(); ++k) {
    const uint32_t* row = slot(guest_ids_[k]);
    if (row != nullptr && is_guest(*row)) remove(guest_ids_[k]);
  }
  guest_ids_.clear();
  ++step_;
  keep_range();
  for (const Rank& held : held_) {
    if (!(rank(held.row) < bar_)) continue;
    late_.push_back(rank(held.row));
    std::push_heap(late_.begin(), late_.end(), std::greater<Rank>());
  }
  held_.clear();
  if (settings_.evict == Evict::lfu && looked_up_ > kSamplesToAge * settings_.capacity) age();
  if (settings_.ttl > 0) sweep(std::max<int64_t>(1024, size_ / settings_.ttl + 1));
}

// ---------------------------------------------------------------- ids that are not stored yet

IdTable::Candidate* IdTable::candidate(int64_t id) {
  const uint64_t mask = candidates_.size() - 1;
  uint64_t at = mixed(id) & mask;
  while (candidates_[at].count != 0 && candidates_[at].id != id) at = (at + 1) & mask;
  return &candidates_[at];
}

void IdTable::count(int64_t id) {
  if (candidates_.empty()) candidates_.resize(1024);
  if (n_candidates_ * 2 > static_cast<int64_t>(candidates_.size())) shrink_candidates();
  Candidate* found = candidate(id);
  if (found->count == 0) ++n_candidates_;
  *found = {id, found->count + 1, step_};
}

bool IdTable::is_admitted(int64_t id) {
  return settings_.admit <= 1 || candidate(id)->count >= settings_.admit;
}

void IdTable::drop_candidate(int64_t id) {
  Candidate* found = candidate(id);
  if (found->count == 0) return;
  --n_candidates_;
  const uint64_t mask = candidates_.size() - 1;
  uint64_t hole = static_cast<uint64_t>(found - candidates_.data());
  candidates_[hole].count = 0;
  for (uint64_t at = (hole + 1) & mask; candidates_[at].count != 0; at = (at + 1) & mask) {
    const uint64_t wanted = mixed(candidates_[at].id) & mask;
    if (((at - wanted) & mask) < ((at - hole) & mask)) continue;
    candidates_[hole] = candidates_[at];
    candidates_[at].count = 0;
    hole = at;
  }
}

// Doubles the number of places, or, when there are many ids, drops their older half.
void IdTable::shrink_candidates() {
  if (n_candidates_ < std::max(kLeastCandidates, 4 * settings_.capacity))
    return rebuild_candidates(candidates_.size() * 2, 0);
  std::vector<int64_t> stamps;
  for (const Candidate& one : candidates_)
    if (one.count != 0) stamps.push_back(one.stamp);
  const auto middle = stamps.begin() + static_cast<int64_t>(stamps.size() / 2);
  std::nth_element(stamps.begin(), middle, stamps.end());
  const int64_t least = *middle;
  const bool shrinks = *std::min_element(stamps.begin(), middle + 1) < least;
  rebuild_candidates(candidates_.size() * (shrinks ? 1 : 2), shrinks ? least : 0);
}

void IdTable::rebuild_candidates(size_t places, int64_t least_stamp) {
  std::vector<Candidate> old(places, Candidate{0, 0, 0});
  old.swap(candidates_);
  n_candidates_ = 0;
  for (const Candidate& one : old) {
    if (one.count == 0 || one.stamp < least_stamp) continue;
    *candidate(one.id) = one;
    ++n_candidates_;
  }
}

}  // namespace recast::ids
