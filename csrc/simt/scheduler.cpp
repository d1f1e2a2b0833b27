// Runs the blocks of a launch: schedules fibers, implements collectives and barriers, and detects
// deadlocks and misuse.
#include "simt/scheduler.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt/block_memory.h"
#include "simt/fiber.h"
#include "simt/launch.h"

namespace simt {

thread_local const Here* here = nullptr;

namespace {

struct Copy {
  void* to;
  const void* from;
};

// The collectives of the lanes of one mask, one after the other. Values alternate between two
// buffers: a lane that is already at the next collective must not overwrite what others still read.
struct WarpCollective {
  uint32_t arrived = 0;
  unsigned round = 0;
  Site site{};
  LaneValues values[2];
};

enum class State { ready, in_collective, in_barrier, returned };

struct Thread {
  Fiber fiber;
  Here here{};
  int number = 0;
  State state = State::returned;
  Site site{};                           // where it waits
  WarpCollective* collective = nullptr;  // which it waits for
  uint32_t mask = 0;
  int atomics = 0;                        // since it last yielded
  std::vector<std::vector<Copy>> copies;  // committed groups and, last, the open one
};

struct Warp {
  uint32_t live = 0;
  std::map<uint32_t, WarpCollective> collectives;  // by mask
};

struct SharedVariable {
  void* data;
  size_t bytes;
};

void enter_thread();

// One OS thread that runs blocks.
class Worker {
 public:
  Worker(Launch& launch, unsigned number)
      : launch_(launch),
        random_(launch.seed * 7919 + number),
        count_(static_cast<int>(launch.block.x * launch.block.y * launch.block.z)),
        threads_(count_),
        memories_(memory_pool().take(memories_for(count_))) {}
  ~Worker() { memory_pool().give_back(std::move(memories_)); }

  void run();

  const LaneValues& warp_collective(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                                    bool orders_memory);
  int block_barrier(const Site& site, bool predicate);
  void* static_shared(const void* key, const char* name, size_t bytes);
  void* dynamic_shared() { return memory_->arena; }
  [[noreturn]] void fail(const Site* site, const std::string& what);
  void run_thread();
  void before_atomic();

  Thread* current = nullptr;
  Fiber host;
  const Launch& launch() const { return launch_; }

 private:
  void run_block(int64_t number);
  void enter_memory(BlockMemory& memory);
  void leave_memory();
  void wait();
  void complete(WarpCollective& collective, Warp& warp);
  std::string deadlock() const;
  Thread& next_ready();

  Launch& launch_;
  std::mt19937 random_;
  int count_;
  std::vector<Thread> threads_;
  std::vector<BlockMemory> memories_;
  BlockMemory* memory_ = nullptr;
  size_t static_used_ = 0;
  std::vector<Warp> warps_;
  std::deque<int> ready_;
  uint64_t blocks_run_ = 0;
  int64_t yields_ = 0;  // since a thread made progress
  int live_ = 0;
  int at_barrier_ = 0;
  unsigned barrier_round_ = 0;
  int predicates_[2] = {0, 0};
  std::map<const void*, SharedVariable> variables_;
  std::string error_;
};

thread_local Worker* worker = nullptr;

void Worker::enter_memory(BlockMemory& memory) {
  memory.reserve(count_,
                 round_up(launch_.shared, 16) + kMaxStaticShared + kMaxVariables * (kGap + 16));
  std::memset(memory.arena, 0xFF, memory.used);
  poison(memory.arena, memory.bytes);
  unpoison(memory.arena, launch_.shared);
  memory.used = round_up(launch_.shared, 16) + kGap;
  static_used_ = 0;
  variables_.clear();
  memory_ = &memory;
}

void Worker::leave_memory() {
  unpoison(memory_->arena, memory_->bytes);
  ++memory_->blocks;
  if (error_.empty()) return;
  // Threads stopped midway were ordered before nothing: what they shared is not used again.
  std::free(memory_->arena);
  memory_->arena = nullptr;
  memory_->bytes = 0;
}

void* Worker::static_shared(const void* key, const char* name, size_t bytes) {
  auto [at, added] = variables_.try_emplace(key, SharedVariable{});
  if (!added) return at->second.data;
  static_used_ += round_up(bytes, 16);
  if (static_used_ > kMaxStaticShared)
    fail(nullptr, text("the shared variables up to '%s' take %zu bytes; %zu is the most", name,
                       static_used_, kMaxStaticShared));
  if (static_used_ + launch_.shared > kMaxShared)
    fail(nullptr, text("shared variables and %zu bytes of dynamic shared memory exceed %zu bytes",
                       launch_.shared, kMaxShared));
  if (variables_.size() > kMaxVariables)
    fail(nullptr, text("more than %zu shared variables", kMaxVariables));
  at->second = SharedVariable{memory_->arena + memory_->used, bytes};
  unpoison(at->second.data, bytes);
  memory_->used += round_up(bytes, 16) + kGap;
  return at->second.data;
}

void Worker::run() {
  worker = this;
  adopt_thread(host);
  order_release(&launch_.order);
  try {
    for (int64_t i; (i = launch_.next.fetch_add(1)) < launch_.blocks;)
      run_block(launch_.order.empty() ? i : launch_.order[i]);
  } catch (const std::exception& error) {
    launch_.next = launch_.blocks;
    std::lock_guard<std::mutex> hold(launch_.lock);
    if (launch_.error.empty()) launch_.error = error.what();
  }
  order_acquire(&launch_);
  worker = nullptr;
}

void Worker::run_block(int64_t number) {
  const dim3 &grid = launch_.grid, &block = launch_.block;
  auto n = static_cast<uint64_t>(number);
  uint3 index = make_uint3(n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y);
  enter_memory(memories_[blocks_run_++ % memories_.size()]);
  warps_.clear();
  warps_.resize((count_ + kWarp - 1) / kWarp);
  ready_.clear();
  live_ = count_;
  at_barrier_ = 0;
  yields_ = 0;
  error_.clear();
  for (int t = 0; t < count_; ++t) {
    Thread& thread = threads_[t];
    thread.here = {make_uint3(t % block.x, t / block.x % block.y, t / (block.x * block.y)), index,
                   block, grid, t % kWarp};
    thread.number = t;
    thread.state = State::ready;
    thread.copies.assign(1, {});
    thread.atomics = 0;
    start(thread.fiber, stack_of(memory_->stacks, t), memory_->histories[t], enter_thread);
    warps_[t / kWarp].live |= 1u << (t % kWarp);
    ready_.push_back(t);
  }
  while (live_ && error_.empty()) {
    if (ready_.empty()) {
      error_ = deadlock();
      break;
    }
    current = &next_ready();
    here = &current->here;
    switch_to(host, current->fiber);
  }
  leave_memory();
  if (!error_.empty()) throw std::runtime_error(error_);
}

Thread& Worker::next_ready() {
  size_t i = launch_.seed == 0 ? 0 : random_() % ready_.size();
  std::swap(ready_[i], ready_.front());
  Thread& thread = threads_[ready_.front()];
  ready_.pop_front();
  return thread;
}

void Worker::run_thread() {
  begin(host);
  order_acquire(&launch_.order);  // what came before the launch
  order_acquire(&memory_->ends[memory_->blocks % 2]);
  launch_.kernel->call(launch_.params);
  Thread& me = *current;
  if (me.copies.size() > 1 || !me.copies.back().empty())
    fail(nullptr, "the thread returns before waiting for its asynchronous copies");
  if (at_barrier_ > 0) {
    auto waiting = std::find_if(threads_.begin(), threads_.end(), [](const Thread& thread) {
      return thread.state == State::in_barrier;
    });
    fail(nullptr, text("the thread returns while thread %s waits for it in ",
                       text(waiting->here.thread).c_str()) +
                      text(waiting->site));
  }
  me.state = State::returned;
  yields_ = 0;
  --live_;
  Warp& warp = warps_[me.number / kWarp];
  warp.live &= ~(1u << me.here.lane);
  for (auto& [mask, collective] : warp.collectives)
    if (collective.arrived != 0 && collective.arrived == (mask & warp.live))
      complete(collective, warp);
  order_release(&memory_->ends[(memory_->blocks + 1) % 2]);
  order_release(&launch_);
  switch_to(me.fiber, host, true);
  std::abort();  // never resumed
}

void Worker::before_atomic() {
  constexpr int kAtomicsPerYield = 1024;
  Thread& me = *current;
  if (++me.atomics < kAtomicsPerYield) return;
  me.atomics = 0;
  if (++yields_ > 100 * count_)
    fail(nullptr, "the threads repeat atomic operations, waiting for what none of them does");
  ready_.push_back(me.number);
  wait();
}

void Worker::wait() {
  Thread& me = *current;
  switch_to(me.fiber, host);
  me.state = State::ready;
}

// All lanes that still run have arrived: makes the waiting ones ready. The round's number chooses
// the buffer, so it is advanced here.
void Worker::complete(WarpCollective& collective, Warp& warp) {
  collective.values[collective.round % 2].present = collective.arrived;
  auto first = static_cast<int>(&warp - warps_.data()) * kWarp;
  for (int lane = 0; lane < kWarp && first + lane < count_; ++lane) {
    Thread& thread = threads_[first + lane];
    if (thread.state == State::in_collective && thread.collective == &collective) {
      thread.state = State::ready;
      ready_.push_back(thread.number);
    }
  }
  yields_ = 0;
  collective.arrived = 0;
  ++collective.round;
}

const LaneValues& Worker::warp_collective(const Site& site, uint32_t mask, const void* mine,
                                          size_t bytes, bool orders_memory) {
  Thread& me = *current;
  Warp& warp = warps_[me.number / kWarp];
  uint32_t my_bit = 1u << me.here.lane;
  if (!(mask & my_bit))
    fail(&site, text("lane %d is not in its own mask %08x", me.here.lane, mask));
  WarpCollective& collective = warp.collectives[mask];
  if (collective.arrived == 0)
    collective.site = site;
  else if (std::strcmp(collective.site.what, site.what) != 0)
    fail(&site, text("other lanes of mask %08x are in ", mask) + text(collective.site));
  unsigned round = collective.round % 2;
  LaneValues& values = collective.values[round];
  const void* tag = &collective.values[round];
  std::memcpy(values.of[me.here.lane], mine, bytes);
  collective.arrived |= my_bit;
  if (orders_memory) order_release(tag);
  if (collective.arrived == (mask & warp.live)) {
    complete(collective, warp);
  } else {
    me.state = State::in_collective;
    me.site = site;
    me.collective = &collective;
    me.mask = mask;
    wait();
  }
  if (orders_memory) order_acquire(tag);
  return values;
}

// CUDA allows a barrier in conditional code only where all threads of the block decide alike; a
// thread that has returned has decided otherwise.
int Worker::block_barrier(const Site& site, bool predicate) {
  Thread& me = *current;
  unsigned round = barrier_round_ % 2;
  if (live_ < count_)
    fail(&site, text("%d of the block's %d threads have returned", count_ - live_, count_));
  if (at_barrier_ == 0) {
    predicates_[round] = 0;
  } else {
    const Thread& other = *std::find_if(threads_.begin(), threads_.end(), [](const Thread& thread) {
      return thread.state == State::in_barrier;
    });
    if (std::strcmp(other.site.file, site.file) != 0 || other.site.line != site.line)
      fail(&site,
           text("thread %s is in another, ", text(other.here.thread).c_str()) + text(other.site));
  }
  predicates_[round] += predicate;
  const void* tag = &memory_->barriers[round];
  order_release(tag);
  if (++at_barrier_ == count_) {
    at_barrier_ = 0;
    yields_ = 0;
    ++barrier_round_;
    for (Thread& thread : threads_) {
      if (thread.state != State::in_barrier) continue;
      thread.state = State::ready;
      ready_.push_back(thread.number);
    }
  } else {
    me.state = State::in_barrier;
    me.site = site;
    wait();
  }
  order_acquire(tag);
  return predicates_[round];
}

std::string Worker::deadlock() const {
  std::map<std::string, std::vector<const Thread*>> groups;
  for (const Thread& thread : threads_) {
    if (thread.state == State::in_barrier) groups[text(thread.site)].push_back(&thread);
    if (thread.state == State::in_collective)
      groups[text("%s of lanes %08x, of which %08x came", text(thread.site).c_str(), thread.mask,
                  thread.collective->arrived)]
          .push_back(&thread);
  }
  std::string message =
      "kernel " + launch_.name + ", block " + text(threads_[0].here.block) + ": deadlock";
  for (const auto& [where, waiting] : groups)
    message += text("; %zu threads, first %s, wait in ", waiting.size(),
                    text(waiting[0]->here.thread).c_str()) +
               where;
  return message;
}

void Worker::fail(const Site* site, const std::string& what) {
  const Here& at = current->here;
  error_ = "kernel " + launch_.name + ", block " + text(at.block) + ", thread " + text(at.thread) +
           ": " + (site ? text(*site) + ": " : "") + what;
  switch_to(current->fiber, host, true);
  std::abort();  // never resumed
}

void enter_thread() { worker->run_thread(); }

}  // namespace

void run_blocks(Launch& launch, unsigned number) { Worker(launch, number).run(); }

const LaneValues& warp_collective(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                                  bool orders_memory) {
  return worker->warp_collective(site, mask, mine, bytes, orders_memory);
}

int block_barrier(const Site& site, bool predicate) {
  return worker->block_barrier(site, predicate);
}

void* dynamic_shared() { return worker->dynamic_shared(); }

void* static_shared(const void* key, const char* name, size_t bytes) {
  return worker->static_shared(key, name, bytes);
}

void fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  order_acquire(&worker->launch().next);
  order_release(&worker->launch().next);
}

void before_atomic() { worker->before_atomic(); }

void start_copy(const Site& site, void* to, const void* from) {
  auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  if (misaligned(to) || misaligned(from)) misuse(&site, "an address is no multiple of 16");
  worker->current->copies.back().push_back({to, from});
}

void commit_copies() { worker->current->copies.emplace_back(); }

void wait_for_copies(int open, void (*copy)(void* to, const void* from)) {
  auto& groups = worker->current->copies;  // the last one is not committed
  while (static_cast<int>(groups.size()) - 1 > open) {
    for (const Copy& one : groups.front()) copy(one.to, one.from);
    groups.erase(groups.begin());
  }
}

void misuse(const Site* site, const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  worker->fail(site, buffer);
}

}  // namespace simt
