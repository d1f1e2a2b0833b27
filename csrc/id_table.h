// A hash table from 64-bit ids to rows of a slab: batches of ids are found, given rows, erased and
// exported.
//
// The slab itself is kept elsewhere. Row 0 is for padding and never given out, rows 1..capacity are
// stored, and the rows after them are for guests: ids that get a row in this step and are forgotten
// when the next one begins. Everything that decides a row number goes through the batch in order,
// so rows do not depend on the number of threads.
//
// A bucket is one cache line of five ids and their rows, and counts the ids that overflowed past
// it, so a search ends where none did, and erasing needs no tombstones.
#pragma once

#include <cstdint>
#include <cstring>
#include <shared_mutex>
#include <utility>
#include <vector>

namespace recast::ids {

// A hash in which every bit depends on every bit of the id.
inline uint64_t mixed(int64_t id) {
  const auto product =
      static_cast<unsigned __int128>(static_cast<uint64_t>(id) ^ 0x2d358dccaa6c78a5ull) *
      0x9e3779b97f4a7c15ull;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// Signed scores as unsigned ones in the same order, and back.
inline uint64_t in_order(int64_t score) {
  return static_cast<uint64_t>(score) ^ (uint64_t{1} << 63);
}
inline int64_t as_given(uint64_t score) {
  return static_cast<int64_t>(score ^ (uint64_t{1} << 63));
}

constexpr int64_t kMostSteps = 0xfffffffe;  // that a stamp can count
constexpr int64_t kWorthThreads = 4096;     // ids below which a second thread costs more

constexpr size_t kMapped = size_t{1} << 21;  // bytes from which memory is mapped, and zero

// Memory aligned to a cache line. Throws std::bad_alloc.
void* reserve(size_t bytes);
void release(void* memory, size_t bytes);

// An array of a trivial type T, backed by memory where it is touched. Large ones use huge pages, as
// random access to small pages waits for the page table too.
template <class T>
class Reserved {
 public:
  Reserved() = default;
  explicit Reserved(size_t n) : data_(static_cast<T*>(reserve(n * sizeof(T)))), size_(n) {}
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  ~Reserved() { release(data_, size_ * sizeof(T)); }

  void clear() {  // fills a new array with zeros
    if (size_ * sizeof(T) < kMapped) std::memset(static_cast<void*>(data_), 0, size_ * sizeof(T));
  }
  void swap(Reserved& other) { std::swap(data_, other.data_), std::swap(size_, other.size_); }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  size_t size() const { return size_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

constexpr uint32_t kPadding = 0;
constexpr int64_t kAbsent = -1;

constexpr int kSlots = 5;
struct alignas(64) Bucket {
  int64_t ids[kSlots];
  uint32_t rows[kSlots];  // kPadding: empty, whatever the id there
  uint32_t past;          // ids whose search goes on past this bucket
};

enum class Evict { never, lru, lfu, epoch_lru, epoch_lfu, given };

// Whether a row has a score besides the step of its last lookup.
inline bool is_scored(Evict evict) { return evict != Evict::never && evict != Evict::lru; }

struct Settings {
  int64_t capacity;  // stored rows
  int64_t guests;    // rows for guests
  Evict evict;
  int64_t admit;  // lookups of an id before it is stored; 1: at once
  int64_t ttl;    // steps without a lookup after which an id is forgotten; 0: never
};

struct Counters {
  int64_t inserted = 0, evicted = 0, expired = 0, refused = 0, hits = 0, misses = 0;
};

// Thrown when no row is free and none may be taken from its id.
struct Full {
  int64_t id;
  bool guests;  // no guest row is free; otherwise evict is `never`
};

class IdTable {
 public:
  explicit IdTable(const Settings& settings);

  // The row of each id, or kAbsent. Changes nothing.
  void find(const int64_t* ids, int64_t n, int64_t* rows, int threads) const;

  // The row of each id; ids without one are given one, in order. `scores`: one per id if the caller
  // gives scores (Evict::given), else null. Throws Full, having changed nothing but counts.
  void find_or_insert(const int64_t* ids, int64_t n, const int64_t* scores, int64_t* rows,
                      int threads);

  struct Given {
    int64_t id;
    uint32_t row;
  };
  // Ids that were given a row since the last call, in that order, guests included.
  std::vector<Given> take_fresh();
  // Ids that lost their row since the last call, in that order, without guests; the contents of a
  // row stay until it is written to.
  std::vector<Given> take_gone();

  // Begins the next step: guests are forgotten, rows looked up in the last step may be evicted.
  void advance();

  int64_t erase(const int64_t* ids, int64_t n);

  // Stored ids, by row, that were looked up in step `since` or later and have not expired.
  struct Stored {
    std::vector<int64_t> ids, rows, scores, stamps;
  };
  Stored stored(int64_t since) const;

  // Replaces all that is stored by these ids in these rows.
  void load(const int64_t* ids, const int64_t* rows, const int64_t* scores, const int64_t* stamps,
            int64_t n);

  // Takes their rows from the `n` ids to evict next, or from fewer, as those looked up in this step
  // keep theirs. The contents of a row stay until it is written to. Such ids are not counted as
  // evicted, nor returned by `take_gone`.
  Stored give_up(int64_t n);
  // Gives each of these ids, which were given up, a free row and its score again; they are not
  // evicted in this step. Throws length_error if there are not enough rows, having changed nothing.
  void take_back(const int64_t* ids, const int64_t* scores, int64_t n, int64_t* rows);

  // Keeps these rows from being evicted in this step.
  void pin(const int64_t* rows, int64_t n);

  // Ids seen but not stored yet, with the number of their lookups and the step of the last one.
  Stored candidates() const;
  void load_candidates(const int64_t* ids, const int64_t* counts, const int64_t* stamps, int64_t n);

  int64_t size() const;
  int64_t guests() const;
  int64_t bytes() const;
  Counters counters() const;
  int64_t step() const;
  void set_step(int64_t step);
  int64_t looked_up() const;  // ids since counts were last halved
  void set_looked_up(int64_t count);
  int64_t epoch() const;
  void set_epoch(int64_t epoch);

  IdTable(const IdTable& other);

 private:
  // Rows in the order in which they are evicted. Of equals the smaller id goes first: a table that
  // was loaded, whose ids have other rows, evicts what the one that was saved does.
  struct Rank {
    uint64_t score;
    int64_t id;
    uint32_t stamp;  // counted from `zero_`
    uint32_t row;
    bool operator<(const Rank& other) const {
      if (score != other.score) return score < other.score;
      return stamp != other.stamp ? stamp < other.stamp : id < other.id;
    }
    bool operator==(const Rank& other) const {
      return score == other.score && stamp == other.stamp && id == other.id;
    }
    bool operator>(const Rank& other) const { return other < *this; }
  };
  static constexpr uint32_t kFree = 0;
  struct Candidate {
    int64_t id, count, stamp;  // count 0: empty
  };

  uint64_t home(int64_t id) const;
  uint32_t* slot(int64_t id);
  uint32_t row_at(int64_t id, uint64_t at) const;  // searched from bucket `at` on; kPadding: none
  void rows_of(const int64_t* ids, int64_t n, int64_t* rows, int threads) const;
  int64_t find_or_put(const int64_t* ids, int64_t n, int64_t* rows, bool while_new);
  void put_new(const int64_t* ids, int64_t n, int64_t expected, int64_t* rows);
  void put_missing(const int64_t* ids, const std::vector<int64_t>& missing, int64_t* rows);
  void put(int64_t id, uint64_t hash, uint32_t row);
  void place(int64_t id, uint64_t hash, uint32_t row);
  void remove(int64_t id);
  static int64_t most_in(size_t buckets);
  void grow(int64_t expected);
  void rebuild(size_t buckets);
  bool is_guest(int64_t row) const { return row > settings_.capacity; }

  // What is known of a row that is given out.
  uint32_t now() const { return static_cast<uint32_t>(step_ - zero_); }
  bool is_free(int64_t row) const { return stamps_[row] == kFree; }
  bool is_pinned(int64_t row) const { return stamps_[row] == now(); }
  int64_t stamp(int64_t row) const { return zero_ + stamps_[row]; }
  uint64_t score(int64_t row) const;
  int64_t told_score(int64_t row) const;
  uint64_t kept_score(int64_t told) const;
  size_t row_bytes() const;
  void set_row(int64_t row, int64_t id, uint64_t score, int64_t stamp);
  bool has_expired(int64_t row) const;
  void keep_range();

  void insert_missing(const int64_t* ids, const int64_t* scores,
                      const std::vector<int64_t>& missing, int64_t* rows);
  bool is_admitted(int64_t id);
  uint32_t give(int64_t id, int64_t score, size_t first_guest);
  uint32_t free_row(int64_t id, int64_t score);
  uint32_t guest_row(int64_t id);
  void forget(uint32_t row);
  void touch(const int64_t* rows, int64_t n, const int64_t* scores, int threads);
  void note(const int64_t* rows, int64_t n, const int64_t* scores);
  void note_low(const int64_t* rows, int64_t n);

  Rank rank(uint32_t row) const { return {score(row), row_ids_[row], stamps_[row], row}; }
  uint32_t lowest();  // the row to evict next, or kPadding
  bool next(Rank& out);
  void scan();
  void age();
  void sweep(int64_t rows);

  Candidate* candidate(int64_t id);
  void count(int64_t id);
  void drop_candidate(int64_t id);
  void shrink_candidates();
  void rebuild_candidates(size_t places, int64_t least_stamp);

  Settings settings_;
  Reserved<Bucket> buckets_;
  uint64_t mask_ = 0;
  int64_t used_ = 0, most_used_ = 0;  // slots, of guests too
  // One entry per row, in separate arrays: a lookup needs only the first, and so few cache lines.
  Reserved<uint32_t> stamps_;  // step of the last lookup, counted from `zero_`, or kFree
  Reserved<uint64_t> scores_;  // empty if the stamp is the score
  Reserved<int64_t> row_ids_;
  int64_t zero_ = 0;
  int64_t n_rows_ = 1;  // rows ever given out, and row 0
  std::vector<uint32_t> free_;
  std::vector<int64_t> guest_ids_;
  std::vector<Given> fresh_, gone_;
  std::vector<Rank> queue_;  // the lowest ranks when it was made, in descending order
  std::vector<Rank> late_;   // rows that fell below `bar_` since: a heap
  std::vector<Rank> held_;   // taken out of both, but looked up in this step
  Rank bar_{};               // as it is here: there is none
  std::vector<Candidate> candidates_;
  int64_t n_candidates_ = 0;
  int64_t size_ = 0, step_ = 1, epoch_ = 0, looked_up_ = 0, swept_ = 1;
  int64_t all_pinned_ = -1, all_swept_ = -1;  // the step in which this was the case
  Counters counters_;
  mutable std::shared_mutex mutex_;
};

}  // namespace recast::ids
