// Runs the blocks of a launch: fibers, meetings, barriers, and what is wrong with them.
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

#include "simt/fiber.h"
#include "simt/launch.h"
#include "simt/room.h"

namespace simt {

thread_local const Here* here = nullptr;

namespace {

struct Copy {
  void* to;
  const void* from;
};

// A barrier of the lanes of one mask, used again and again. Deposits alternate between two buffers:
// a lane that is already at the next barrier must not overwrite what others still read.
struct Meeting {
  uint32_t arrived = 0;
  unsigned round = 0;
  Site site{};
  Deposits deposits[2];
};

enum class State { ready, in_meeting, in_barrier, returned };

struct Thread {
  Fiber fiber;
  Here here{};
  int number = 0;
  State state = State::returned;
  Site site{};                 // where it waits
  Meeting* meeting = nullptr;  // which it waits for
  uint32_t mask = 0;
  int atomics = 0;                        // since it last yielded
  std::vector<std::vector<Copy>> copies;  // closed groups and, last, the open one
};

struct Warp {
  uint32_t live = 0;
  std::map<uint32_t, Meeting> meetings;  // by mask
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
        rooms_(all_rooms().take(rooms_for(count_))) {}
  ~Worker() { all_rooms().give_back(std::move(rooms_)); }

  void run();

  const Deposits& meet(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                       bool orders_memory);
  int meet_block(const Site& site, bool predicate);
  void* static_shared(const void* key, const char* name, size_t bytes);
  void* dynamic_shared() { return room_->arena; }
  [[noreturn]] void fail(const Site* site, const std::string& what);
  void run_thread();
  void try_again();

  Thread* current = nullptr;
  Fiber host;
  const Launch& launch() const { return launch_; }

 private:
  void run_block(int64_t number);
  void enter_room(Room& room);
  void leave_room();
  void wait();
  void complete(Meeting& meeting, Warp& warp);
  std::string deadlock() const;
  Thread& next_ready();

  Launch& launch_;
  std::mt19937 random_;
  int count_;
  std::vector<Thread> threads_;
  std::vector<Room> rooms_;
  Room* room_ = nullptr;
  size_t static_used_ = 0;
  std::vector<Warp> warps_;
  std::deque<int> ready_;
  uint64_t blocks_run_ = 0;
  int64_t gave_way_ = 0;  // since a thread made progress
  int live_ = 0;
  int at_barrier_ = 0;
  unsigned barrier_round_ = 0;
  int predicates_[2] = {0, 0};
  std::map<const void*, SharedVariable> variables_;
  std::string error_;
};

thread_local Worker* worker = nullptr;

void Worker::enter_room(Room& room) {
  room.reserve(count_,
               round_up(launch_.shared, 16) + kMaxStaticShared + kMaxVariables * (kGap + 16));
  std::memset(room.arena, 0xFF, room.used);
  forbid(room.arena, room.bytes);
  allow(room.arena, launch_.shared);
  room.used = round_up(launch_.shared, 16) + kGap;
  static_used_ = 0;
  variables_.clear();
  room_ = &room;
}

void Worker::leave_room() {
  allow(room_->arena, room_->bytes);
  ++room_->blocks;
  if (error_.empty()) return;
  // Threads stopped midway were ordered before nothing: what they shared is not used again.
  std::free(room_->arena);
  room_->arena = nullptr;
  room_->bytes = 0;
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
  at->second = SharedVariable{room_->arena + room_->used, bytes};
  allow(at->second.data, bytes);
  room_->used += round_up(bytes, 16) + kGap;
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
  enter_room(rooms_[blocks_run_++ % rooms_.size()]);
  warps_.clear();
  warps_.resize((count_ + kWarp - 1) / kWarp);
  ready_.clear();
  live_ = count_;
  at_barrier_ = 0;
  gave_way_ = 0;
  error_.clear();
  for (int t = 0; t < count_; ++t) {
    Thread& thread = threads_[t];
    thread.here = {make_uint3(t % block.x, t / block.x % block.y, t / (block.x * block.y)), index,
                   block, grid, t % kWarp};
    thread.number = t;
    thread.state = State::ready;
    thread.copies.assign(1, {});
    thread.atomics = 0;
    start(thread.fiber, stack_of(room_->stacks, t), room_->histories[t], enter_thread);
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
  leave_room();
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
  order_acquire(&room_->ends[room_->blocks % 2]);
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
  gave_way_ = 0;
  --live_;
  Warp& warp = warps_[me.number / kWarp];
  warp.live &= ~(1u << me.here.lane);
  for (auto& [mask, meeting] : warp.meetings)
    if (meeting.arrived != 0 && meeting.arrived == (mask & warp.live)) complete(meeting, warp);
  order_release(&room_->ends[(room_->blocks + 1) % 2]);
  order_release(&launch_);
  switch_to(me.fiber, host, true);
  std::abort();  // never resumed
}

void Worker::try_again() {
  constexpr int kPatience = 1024;
  Thread& me = *current;
  if (++me.atomics < kPatience) return;
  me.atomics = 0;
  if (++gave_way_ > 100 * count_)
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
void Worker::complete(Meeting& meeting, Warp& warp) {
  meeting.deposits[meeting.round % 2].present = meeting.arrived;
  auto first = static_cast<int>(&warp - warps_.data()) * kWarp;
  for (int lane = 0; lane < kWarp && first + lane < count_; ++lane) {
    Thread& thread = threads_[first + lane];
    if (thread.state == State::in_meeting && thread.meeting == &meeting) {
      thread.state = State::ready;
      ready_.push_back(thread.number);
    }
  }
  gave_way_ = 0;
  meeting.arrived = 0;
  ++meeting.round;
}

const Deposits& Worker::meet(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                             bool orders_memory) {
  Thread& me = *current;
  Warp& warp = warps_[me.number / kWarp];
  uint32_t my_bit = 1u << me.here.lane;
  if (!(mask & my_bit))
    fail(&site, text("lane %d is not in its own mask %08x", me.here.lane, mask));
  Meeting& meeting = warp.meetings[mask];
  if (meeting.arrived == 0)
    meeting.site = site;
  else if (std::strcmp(meeting.site.what, site.what) != 0)
    fail(&site, text("other lanes of mask %08x are in ", mask) + text(meeting.site));
  unsigned round = meeting.round % 2;
  Deposits& deposits = meeting.deposits[round];
  const void* tag = &meeting.deposits[round];
  std::memcpy(deposits.of[me.here.lane], mine, bytes);
  meeting.arrived |= my_bit;
  if (orders_memory) order_release(tag);
  if (meeting.arrived == (mask & warp.live)) {
    complete(meeting, warp);
  } else {
    me.state = State::in_meeting;
    me.site = site;
    me.meeting = &meeting;
    me.mask = mask;
    wait();
  }
  if (orders_memory) order_acquire(tag);
  return deposits;
}

// CUDA allows a barrier in conditional code only where all threads of the block decide alike; a
// thread that has returned has decided otherwise.
int Worker::meet_block(const Site& site, bool predicate) {
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
  const void* tag = &room_->barriers[round];
  order_release(tag);
  if (++at_barrier_ == count_) {
    at_barrier_ = 0;
    gave_way_ = 0;
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
    if (thread.state == State::in_meeting)
      groups[text("%s of lanes %08x, of which %08x came", text(thread.site).c_str(), thread.mask,
                  thread.meeting->arrived)]
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

const Deposits& meet(const Site& site, uint32_t mask, const void* mine, size_t bytes,
                     bool orders_memory) {
  return worker->meet(site, mask, mine, bytes, orders_memory);
}

int meet_block(const Site& site, bool predicate) { return worker->meet_block(site, predicate); }

void* dynamic_shared() { return worker->dynamic_shared(); }

void* static_shared(const void* key, const char* name, size_t bytes) {
  return worker->static_shared(key, name, bytes);
}

void fence() {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  order_acquire(&worker->launch().next);
  order_release(&worker->launch().next);
}

void try_again() { worker->try_again(); }

void copy_later(const Site& site, void* to, const void* from) {
  auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
  if (misaligned(to) || misaligned(from)) misuse(&site, "an address is no multiple of 16");
  worker->current->copies.back().push_back({to, from});
}

void close_copies() { worker->current->copies.emplace_back(); }

void await_copies(int open, void (*copy)(void* to, const void* from)) {
  auto& groups = worker->current->copies;  // the last one is not closed
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
