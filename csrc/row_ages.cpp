#include "row_ages.h"

#include <algorithm>

#include "isa.h"
#include "parallel.h"
#include "row_update.h"

#define RECAST_KERNEL "row_ages_kernel.h"
#include "each_isa_exact.h"

namespace recast::rows {

namespace {

// Numbers of one task, and those from which a second thread saves more than it costs.
constexpr int64_t kTaskNumbers = 1 << 17, kWorthThreads = 1 << 16;

// How many blocks make a task.
int64_t blocks_of_task(int64_t dim) {
  return std::max<int64_t>(1, kTaskNumbers / (kRowsOfBlock * std::max<int64_t>(dim, 1)));
}

int64_t blocks_of(int64_t rows) { return (rows + kRowsOfBlock - 1) / kRowsOfBlock; }

// Whether rows without a gradient move: those of rmsprop by momentum only.
bool moves(const Target& to) { return to.action != Action::rmsprop || to.second.data != nullptr; }

// Calls kernel(moments, ages, first row, last row) for all rows: whole blocks on one thread.
template <class Kernel>
void each_row(const Moments& moments, const Ages& ages, int threads, const Kernel& kernel) {
  const int64_t step = blocks_of_task(moments.dim) * kRowsOfBlock;
  if (moments.rows * moments.dim < kWorthThreads) threads = 1;
  parallel_dynamic(threads, (moments.rows + step - 1) / step, [&](int64_t i, int) {
    kernel(moments, ages, i * step, std::min((i + 1) * step, moments.rows));
  });
}

}  // namespace

void settle(const Moments& moments, const Ages& ages, int threads) {
  each_row(moments, ages, threads, RECAST_CHOOSE(settle));
}

void begin(const Moments& moments, const Ages& ages, int threads) {
  std::fill_n(ages.awake, blocks_of(moments.rows), 0);
  each_row(moments, ages, threads, RECAST_CHOOSE(begin));
}

void sweep(const std::vector<Plan::Table>& tables, const std::vector<Target>& targets,
           int threads) {
  struct Task {
    size_t table;
    int64_t first, last;
  };
  std::vector<Task> tasks;
  int64_t numbers = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    if (targets[t].ages.last == nullptr || !moves(targets[t])) continue;
    numbers += tables[t].rows * tables[t].dim;
    const int64_t blocks = blocks_of(tables[t].rows), step = blocks_of_task(tables[t].dim);
    for (int64_t first = 0; first < blocks; first += step)
      tasks.push_back({t, first, std::min(first + step, blocks)});
  }
  if (numbers < kWorthThreads) threads = 1;
  const auto kernel = RECAST_CHOOSE(sweep);
  parallel_dynamic(threads, static_cast<int64_t>(tasks.size()), [&](int64_t i, int) {
    const Task& task = tasks[static_cast<size_t>(i)];
    kernel(targets[task.table], tables[task.table].rows, tables[task.table].dim, task.first,
           task.last);
  });
}

}  // namespace recast::rows
