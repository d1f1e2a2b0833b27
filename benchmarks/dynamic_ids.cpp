// Runs batches of ids through the id table and through flat hash maps with the same hash, in turn.
// Prints a line for each size and map: ids, its name, then millions of ids per second of both, for
// three uses.
#include <time.h>

#include <algorithm>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <vector>

#if __has_include(<absl/container/flat_hash_map.h>)
#include <absl/container/flat_hash_map.h>
#define HAS_ABSEIL
#endif
#if __has_include(<ankerl/unordered_dense.h>)
#include <ankerl/unordered_dense.h>
#define HAS_ANKERL
#endif

#include "id_table.h"

using namespace recast::ids;

namespace {

struct Hash {
  using is_avalanching = void;
  size_t operator()(int64_t id) const { return mixed(id); }
};

constexpr int64_t kBatch = 65536;
constexpr int kRounds = 41, kBatches = 8;
constexpr int64_t kColdIds = 20'000'000;  // in all rounds, of which there are 3 to 25

// CPU time of a single thread, which other programs affect only through the caches; wall time of
// several.
double now(int threads) {
  timespec at;
  clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &at);
  return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

double middle(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

struct Pair {
  std::vector<double> ours, theirs;
  void print(double ids) const {
    std::printf(" %.1f %.1f", ids / middle(ours) / 1e6, ids / middle(theirs) / 1e6);
  }
};

template <class Map>
void measure(const char* name, int64_t size, int threads) {
  const auto seconds = [threads](const std::function<void()>& work) {
    const double start = now(threads);
    work();
    return now(threads) - start;
  };
  std::mt19937_64 random(1);
  std::vector<int64_t> known(size), ids(kBatch), rows(kBatch);
  for (int64_t& id : known) id = static_cast<int64_t>(random());
  Pair cold, find, find_or_insert;
  const auto rounds = static_cast<int>(std::clamp<int64_t>(kColdIds / size, 3, 25));
  for (int round = 0; round < rounds; ++round) {
    std::optional<IdTable> made;
    std::optional<Map> other;
    cold.ours.push_back(seconds([&] {
      IdTable& table = made.emplace(Settings{size, 1 << 20, Evict::lru, 1, 0});
      for (int64_t at = 0; at < size; at += kBatch) {
        const int64_t n = std::min(kBatch, size - at);
        table.find_or_insert(known.data() + at, n, nullptr, rows.data(), threads);
        table.take_fresh();
      }
    }));
    // Neither knows the size beforehand, except ours its budget; both say which ids are new.
    cold.theirs.push_back(seconds([&] {
      Map& map = other.emplace();
      for (int64_t at = 0; at < size; at += kBatch) {
        std::vector<IdTable::Given> fresh;
        for (int64_t i = 0; i < std::min(kBatch, size - at); ++i) {
          const int64_t id = known[at + i];
          const auto next = static_cast<uint32_t>(map.size() + 1);
          const auto [place, is_new] = map.try_emplace(id, next);
          rows[i] = place->second;
          if (is_new) fresh.push_back({id, next});
        }
      }
    }));
    if (round + 1 < rounds) continue;
    IdTable& table = *made;
    Map& map = *other;
    for (int k = 0; k < kRounds; ++k) {
      double spent[4] = {};
      for (int batch = 0; batch < kBatches; ++batch) {
        const auto draw = [&] {
          for (int64_t& id : ids) id = known[random() % size];
        };
        draw();
        spent[0] += seconds([&] { table.find(ids.data(), kBatch, rows.data(), threads); });
        draw();
        spent[1] += seconds([&] {
          for (int64_t i = 0; i < kBatch; ++i) rows[i] = map.find(ids[i])->second;
        });
        draw();
        spent[2] += seconds(
            [&] { table.find_or_insert(ids.data(), kBatch, nullptr, rows.data(), threads); });
        draw();
        spent[3] += seconds([&] {
          for (int64_t i = 0; i < kBatch; ++i) rows[i] = map.try_emplace(ids[i], 0).first->second;
        });
        table.advance();
      }
      find.ours.push_back(spent[0]), find.theirs.push_back(spent[1]);
      find_or_insert.ours.push_back(spent[2]), find_or_insert.theirs.push_back(spent[3]);
    }
  }
  std::printf("%lld %s", static_cast<long long>(size), name);
  find.print(double(kBatch) * kBatches);
  find_or_insert.print(double(kBatch) * kBatches);
  cold.print(static_cast<double>(size));
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = std::atoi(argv[1]);
  for (int k = 2; k < argc; ++k) {
    const int64_t size = std::atoll(argv[k]);
    measure<boost::unordered_flat_map<int64_t, uint32_t, Hash>>("boost", size, threads);
#ifdef HAS_ABSEIL
    measure<absl::flat_hash_map<int64_t, uint32_t, Hash>>("abseil", size, threads);
#endif
#ifdef HAS_ANKERL
    measure<ankerl::unordered_dense::map<int64_t, uint32_t, Hash>>("ankerl", size, threads);
#endif
  }
}
