// Tables that are stepped whole: where every row moves, or the table is so small that to tell which
// rows move would take longer. Their gradient is dense, but only for some rows at a time.
#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "row_update.h"

#define RECAST_KERNEL "row_whole_kernel.h"
#include "each_isa_exact.h"

namespace recast::rows {

namespace {

// Numbers whose gradient is there at once: few enough to stay in L1.
constexpr int64_t kGradients = 1 << 12;
// Numbers of one task, and those from which a second thread saves more than it costs.
constexpr int64_t kTaskNumbers = 1 << 17, kWorthThreads = 1 << 16;

int64_t rows_of(int64_t numbers, int64_t dim) {
  return std::max<int64_t>(1, numbers / std::max<int64_t>(dim, 1));
}

}  // namespace

// All memory that step_whole takes.
Plan::Whole Plan::prepare_whole(const std::vector<Target>& targets) const {
  Whole whole{{}, {}, 0, 1};
  int64_t numbers = 0;
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!targets[t].whole) continue;
    const Table& table = tables_[t];
    const int64_t step = rows_of(kTaskNumbers, table.dim);
    for (int64_t first = 0; first < table.rows; first += step)
      whole.parts.push_back({t, first, std::min(first + step, table.rows)});
    numbers += table.rows * table.dim;
    const int64_t rows = std::min(rows_of(kGradients, table.dim), table.rows);
    whole.room = std::max(whole.room, rows * table.dim);
  }
  if (numbers >= kWorthThreads) whole.threads = std::max(asked_threads_, 1);
  whole.gradients.resize(static_cast<size_t>(whole.room * whole.threads));
  return whole;
}

void Plan::step_whole(const std::vector<Target>& targets, Whole& whole) const {
  const auto step = RECAST_CHOOSE(step_numbers);
  parallel_dynamic(whole.threads, static_cast<int64_t>(whole.parts.size()), [&](int64_t i, int k) {
    const auto& [table, begin, end] = whole.parts[static_cast<size_t>(i)];
    const int64_t dim = tables_[table].dim, rows = rows_of(kGradients, dim);
    const Entry *const entries = sorted_[table].entries, *const last =
                                                             entries + sorted_[table].valid;
    const auto before = [](const Entry& entry, int64_t row) { return entry.row < row; };
    const Entry* next = std::lower_bound(entries, last, begin, before);
    // The gradients are summed as SGD would sum them, with steps of -1 from zeros.
    Target sum{};
    sum.action = Action::sgd;
    sum.stride = dim;
    sum.scale = targets[table].scale;
    sum.lr = -1.0f;
    float* const gradient = whole.gradients.data() + k * whole.room;
    for (int64_t first = begin; first < end; first += rows) {
      const int64_t count = std::min(rows, end - first) * dim;
      const Entry* const from = next;
      next = std::lower_bound(from, last, std::min(first + rows, end), before);
      std::fill_n(gradient, count, 0.0f);
      if (from != next) {
        sum.weight = reinterpret_cast<char*>(gradient) - first * dim * 4;
        Run run = run_of(table, static_cast<size_t>(from - entries),
                         static_cast<size_t>(next - entries), nullptr);
        run.end = run.last;
        kernel_(run, sum);
      }
      step(targets[table], gradient, first * dim, count);
    }
  });
}

}  // namespace recast::rows
