// Row gradients: sum the gradient of many embedding lookups by row, and update tables in place.
//
// A table's gradient is a list of pieces, one per lookup. Every id becomes an entry (row, source):
// which row of the table it looked up, and which row of the upstream gradient flows there. Entries
// are sorted by row (stably, so a row's gradients are added in the order of the batch) and then
// read once, row by row: sum, and update or store. Rows are independent, and each is summed by one
// thread in a fixed order, so the result does not depend on the number of threads; nor on the
// instruction set, as no multiplication is fused with an addition.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "row_ages.h"

namespace recast::rows {

// The format of a table's 16-bit numbers; all others are fp32.
enum class Half { none, fp16, bf16 };

// The gradient of one lookup.
struct Piece {
  const void* ids;       // n_ids of int32 or int64
  const void* offsets;   // starts of bags, int32 or int64; null: every bag has `fixed` ids
  const float* weights;  // n_ids factors, or null
  char* gradient;        // n_bags rows; never written
  int64_t stride;        // bytes from one gradient row to the next
  int64_t n_ids;
  int64_t n_bags;
  int64_t n_offsets;  // n_bags, or n_bags + 1 with the end of the last bag
  int64_t fixed;
  int64_t padding;  // this id gets no gradient; -1: none
  float factor;     // of the whole piece
  bool wide_ids, wide_offsets;
  bool mean;  // divide by the number of ids in the bag that are not padding
};

// For ids without a gradient `row` is the table's number of rows, so they are sorted last.
struct Entry {
  uint32_t row;
  uint32_t source;  // bag if the table is direct, else index into its sources
};

struct Source {
  char* gradient;
  float factor;
};

enum class Action { sgd, adagrad, row_wise_adagrad, adam, momentum, rmsprop, store };

// One table's part of a step: its action on the summed gradient g * scale of each row.
//   sgd               w -= lr g
//   adagrad           s += g^2,  w -= lr g / (sqrt(s) + eps)
//   row_wise_adagrad  s += mean of g^2,  w -= lr g / (sqrt(s) + eps)   one s per row
//   adam              w -= decay w,  s += share (g - s),
//                     s' += second_share (g^2 - s'),  w -= lr s / (sqrt(s') + eps)
//   momentum          s = beta s + share g,  w -= lr s; w -= lr (g + ahead s) if ahead is not 0
//   rmsprop           s = beta s + share g^2,  w -= lr g / (sqrt(s) + eps); with a second state
//                     s' = beta' s' + g / (sqrt(s) + eps),  w -= lr s'
//   store             writes row numbers to ids and sums to w, contiguously; scale is not used
// adam, momentum, rmsprop and, if its table is stepped whole, adagrad first take g += l2 w. Without
// a state, momentum is sgd that does so, for tables that are stepped whole.
struct Target {
  struct State {
    char* data;
    int64_t stride;  // numbers from one row's to the next
  };
  Action action;
  char* weight;
  int64_t stride;  // numbers from one row to the next
  State state, second;
  int64_t* ids;
  uint64_t seed;
  bool narrow;        // the weights have 16 bits
  bool narrow_state;  // the states have 16 bits
  bool at_random;     // 16-bit weights are rounded stochastically
  float scale, lr, eps, share, second_share, decay, l2, ahead;
  // momentum, rmsprop, and adam if it is to move all rows, either have ages or are stepped whole.
  Ages ages;      // else `last` is null
  bool whole;     // every row takes the step, of a gradient of 0 where it has none; fp32 only
  float keep[2];  // what such a step multiplies the moments by first
};

// All entries of a range of rows, and where their gradients are.
struct Run {
  const Entry* first;
  const Entry* last;
  const Entry* end;       // of the table's entries, so that prefetching stays inside
  const Source* sources;  // null: `gradient + source * stride`, times `factor`
  char* gradient;
  int64_t stride;  // bytes
  float factor;
  int64_t dim;
  float* buffer;  // dim numbers
  Half half;
  bool narrow;  // the gradients have 16 bits
};

using Kernel = void (*)(const Run&, const Target&);

// An id outside its table, or offsets outside their ids.
struct BadInput {
  size_t table;
  int64_t id;
  bool offsets;
};

// The sorted entries of all tables of a step.
class Plan {
 public:
  struct Table {
    int64_t rows, dim;
    size_t first_piece, last_piece;
    Half half;
    bool narrow;  // the gradients have 16 bits
  };

  // Throws BadInput, always the same one for the same pieces.
  Plan(std::vector<Table> tables, std::vector<Piece> pieces, int threads);

  // How many rows of each table have a gradient.
  std::vector<int64_t> counts();

  // One target for each table. Tables with ages must be fp32; their other rows are swept.
  void run(const std::vector<Target>& targets);

 private:
  struct Sorted {
    Entry* entries;
    size_t n;      // all
    size_t valid;  // those that have a gradient
    Source* sources;
    float factor;
  };
  struct Task {
    size_t table;
    size_t first, last;  // entries
    int64_t rows_before;
  };
  // Tables that are stepped whole: some rows each, and memory for gradients of each thread.
  struct Whole {
    struct Part {
      size_t table;
      int64_t first, last;  // rows
    };
    std::vector<Part> parts;
    std::vector<float> gradients;
    int64_t room;  // numbers of each thread
    int threads;
  };

  void sort_all();
  void cut();
  bool is_direct(const Table& table) const;
  Run run_of(size_t table, size_t first, size_t last, float* buffer) const;
  Whole prepare_whole(const std::vector<Target>& targets) const;
  void step_whole(const std::vector<Target>& targets, Whole& whole) const;

  std::vector<Table> tables_;
  std::vector<Piece> pieces_;
  std::vector<Sorted> sorted_;
  std::vector<Task> tasks_;
  std::vector<int64_t> counts_;
  std::shared_ptr<void> memory_;
  int asked_threads_, threads_;  // the latter: that are worth it for the gradients
  Kernel kernel_;
};

// What a step does to the rows without a gradient, in the tables that have ages; in row_ages.cpp.
void sweep(const std::vector<Plan::Table>& tables, const std::vector<Target>& targets, int threads);

}  // namespace recast::rows
