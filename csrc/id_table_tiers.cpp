// Rows that move to a lower tier, with all that is stored about them, and back.
#include <mutex>
#include <stdexcept>

#include "id_table.h"

namespace recast::ids {

IdTable::Stored IdTable::give_up(int64_t n) {
  std::unique_lock lock(mutex_);
  Stored out;
  while (static_cast<int64_t>(out.ids.size()) < n) {
    const uint32_t row = lowest();
    if (row == kPadding) break;
    out.ids.push_back(row_ids_[row]);
    out.rows.push_back(static_cast<int64_t>(row));
    out.scores.push_back(told_score(row));
    out.stamps.push_back(stamp(row));
    remove(row_ids_[row]);
    stamps_[row] = kFree;
    free_.push_back(row);
    --size_;
  }
  return out;
}

void IdTable::take_back(const int64_t* ids, const int64_t* scores, int64_t n, int64_t* rows) {
  std::unique_lock lock(mutex_);
  if (settings_.capacity - size_ < n) throw std::length_error("fewer free rows than ids");
  for (int64_t i = 0; i < n; ++i) {
    if (slot(ids[i]) != nullptr) throw std::invalid_argument("an id that has a row already");
    uint32_t row;
    if (!free_.empty()) {
      row = free_.back();
      free_.pop_back();
    } else {
      row = static_cast<uint32_t>(n_rows_++);
    }
    set_row(row, ids[i], kept_score(scores[i]), step_);
    put(ids[i], mixed(ids[i]), row);
    ++size_;
    rows[i] = row;
  }
  note_low(rows, n);
}

}  // namespace recast::ids
