// What a table holds, for copies, checkpoints and reports.
#include <algorithm>
#include <mutex>

#include "id_table.h"

namespace recast::ids {

IdTable::IdTable(const IdTable& other) : IdTable(other.settings_) {
  std::shared_lock lock(other.mutex_);
  Reserved<Bucket>(other.buckets_.size()).swap(buckets_);
  std::copy_n(other.buckets_.data(), other.buckets_.size(), buckets_.data());
  mask_ = other.mask_;
  used_ = other.used_;
  most_used_ = other.most_used_;
  std::copy_n(other.stamps_.data(), other.n_rows_, stamps_.data());
  if (other.scores_.size() > 0) std::copy_n(other.scores_.data(), other.n_rows_, scores_.data());
  std::copy_n(other.row_ids_.data(), other.n_rows_, row_ids_.data());
  zero_ = other.zero_;
  n_rows_ = other.n_rows_;
  free_ = other.free_;
  guest_ids_ = other.guest_ids_;
  fresh_ = other.fresh_;
  gone_ = other.gone_;
  queue_ = other.queue_;
  late_ = other.late_;
  held_ = other.held_;
  bar_ = other.bar_;
  candidates_ = other.candidates_;
  n_candidates_ = other.n_candidates_;
  size_ = other.size_;
  step_ = other.step_;
  epoch_ = other.epoch_;
  looked_up_ = other.looked_up_;
  swept_ = other.swept_;
  all_pinned_ = other.all_pinned_;
  all_swept_ = other.all_swept_;
  counters_ = other.counters_;
}

std::vector<IdTable::Given> IdTable::take_fresh() {
  std::unique_lock lock(mutex_);
  std::vector<Given> taken;
  taken.swap(fresh_);
  return taken;
}

std::vector<IdTable::Given> IdTable::take_gone() {
  std::unique_lock lock(mutex_);
  std::vector<Given> taken;
  taken.swap(gone_);
  return taken;
}

int64_t IdTable::erase(const int64_t* ids, int64_t n) {
  std::unique_lock lock(mutex_);
  int64_t erased = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t* row = slot(ids[i]);
    if (row == nullptr || is_guest(*row)) continue;
    forget(*row);
    ++erased;
  }
  return erased;
}

IdTable::Stored IdTable::stored(int64_t since) const {
  std::shared_lock lock(mutex_);
  Stored out;
  for (int64_t row = 1; row < n_rows_; ++row) {
    if (is_free(row) || stamp(row) < since || has_expired(row)) continue;
    out.ids.push_back(row_ids_[row]);
    out.rows.push_back(row);
    out.scores.push_back(told_score(row));
    out.stamps.push_back(stamp(row));
  }
  return out;
}

void IdTable::load(const int64_t* ids, const int64_t* rows, const int64_t* scores,
                   const int64_t* stamps, int64_t n) {
  std::unique_lock lock(mutex_);
  const int64_t most = n > 0 ? *std::max_element(rows, rows + n) : 0;
  free_.clear(), guest_ids_.clear(), fresh_.clear(), gone_.clear();
  queue_.clear(), late_.clear(), held_.clear();
  bar_ = {};
  used_ = 0, size_ = n, swept_ = 1;
  all_pinned_ = all_swept_ = -1;
  Reserved<Bucket>().swap(buckets_);
  rebuild(16);
  n_rows_ = most + 1;
  std::fill_n(stamps_.data(), n_rows_, kFree);
  // Leaves room for later steps: the caller sets the step afterwards.
  const int64_t latest = n > 0 ? *std::max_element(stamps, stamps + n) : 0;
  zero_ = std::max<int64_t>(0, latest - kMostSteps / 2);
  for (int64_t i = 0; i < n; ++i) {
    set_row(rows[i], ids[i], kept_score(scores[i]), stamps[i]);
    put(ids[i], mixed(ids[i]), static_cast<uint32_t>(rows[i]));
  }
  for (int64_t row = most; row > 0; --row)
    if (is_free(row)) free_.push_back(static_cast<uint32_t>(row));
}

void IdTable::pin(const int64_t* rows, int64_t n) {
  std::unique_lock lock(mutex_);
  for (int64_t i = 0; i < n; ++i) stamps_[rows[i]] = now();
  note_low(rows, n);
}

IdTable::Stored IdTable::candidates() const {
  std::shared_lock lock(mutex_);
  Stored out;
  for (const Candidate& one : candidates_) {
    if (one.count == 0) continue;
    out.ids.push_back(one.id);
    out.scores.push_back(one.count);
    out.stamps.push_back(one.stamp);
  }
  return out;
}

void IdTable::load_candidates(const int64_t* ids, const int64_t* counts, const int64_t* stamps,
                              int64_t n) {
  std::unique_lock lock(mutex_);
  candidates_.clear();
  n_candidates_ = 0;
  size_t places = 1024;
  while (static_cast<int64_t>(places) < 3 * n) places *= 2;
  candidates_.resize(places, Candidate{0, 0, 0});
  for (int64_t i = 0; i < n; ++i) *candidate(ids[i]) = {ids[i], counts[i], stamps[i]};
  n_candidates_ = n;
}

int64_t IdTable::size() const {
  std::shared_lock lock(mutex_);
  return size_;
}

int64_t IdTable::guests() const {
  std::shared_lock lock(mutex_);
  return static_cast<int64_t>(guest_ids_.size());
}

int64_t IdTable::bytes() const {
  std::shared_lock lock(mutex_);
  return static_cast<int64_t>(buckets_.size() * sizeof(Bucket) +
                              static_cast<size_t>(n_rows_) * row_bytes() +
                              candidates_.capacity() * sizeof(Candidate) +
                              (queue_.capacity() + late_.capacity()) * sizeof(Rank));
}

Counters IdTable::counters() const {
  std::shared_lock lock(mutex_);
  return counters_;
}

int64_t IdTable::step() const {
  std::shared_lock lock(mutex_);
  return step_;
}

void IdTable::set_step(int64_t step) {
  std::unique_lock lock(mutex_);
  step_ = step;
  keep_range();
}

int64_t IdTable::looked_up() const {
  std::shared_lock lock(mutex_);
  return looked_up_;
}

void IdTable::set_looked_up(int64_t count) {
  std::unique_lock lock(mutex_);
  looked_up_ = count;
}

int64_t IdTable::epoch() const {
  std::shared_lock lock(mutex_);
  return epoch_;
}

void IdTable::set_epoch(int64_t epoch) {
  std::unique_lock lock(mutex_);
  epoch_ = epoch;
}

}  // namespace recast::ids
