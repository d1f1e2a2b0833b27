// Loops over several threads. An exception that left an OpenMP loop would end the process, and any
// task that allocates may throw: here the first one is kept, tasks that have not begun are left
// out, and the caller gets it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#if defined(__SANITIZE_THREAD__)
#include <thread>
#include <vector>
#elif defined(_OPENMP)
#include <omp.h>
#endif

namespace recast {

// Calls body(thread, number of threads) on each of up to `threads` threads; it must not throw.
#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer does not see how OpenMP's threads wait for each other, as their runtime was not
// compiled for it; it knows that what happens on a thread lies between its start and its join.
template <class Body>
void on_threads(int threads, const Body& body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back([&body, t, threads] { body(t, threads); });
  body(0, threads);
  for (std::thread& other : others) other.join();
}
#elif defined(_OPENMP)
template <class Body>
void on_threads(int threads, const Body& body) {
#pragma omp parallel num_threads(threads)
  body(omp_get_thread_num(), omp_get_num_threads());
}
#else
template <class Body>
void on_threads(int, const Body& body) {
  body(0, 1);
}
#endif

// The first exception of several threads.
class FirstError {
 public:
  template <class Task>
  void run(const Task& task) {
    if (found_.load(std::memory_order_relaxed)) return;
    try {
      task();
    } catch (...) {
      if (!found_.exchange(true)) error_ = std::current_exception();
    }
  }
  void check() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> found_{false};
  std::exception_ptr error_;  // written by one thread, read after all have ended
};

// task(i, thread) for each i in [0, count): equally many neighbours on each thread.
template <class Task>
void parallel_static(int threads, int64_t count, const Task& task) {
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  FirstError error;
  on_threads(threads, [&](int thread, int all) {
    error.run([&] {
      const int64_t last = count * (thread + 1) / all;
      for (int64_t i = count * thread / all; i < last; ++i) task(i, thread);
    });
  });
  error.check();
}

// task(i, thread) for each i in [0, count): a thread that is free takes the next one.
template <class Task>
void parallel_dynamic(int threads, int64_t count, const Task& task) {
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i, 0);
    return;
  }
  FirstError error;
  std::atomic<int64_t> next{0};
  on_threads(threads, [&](int thread, int) {
    for (int64_t i = next++; i < count; i = next++) error.run([&] { task(i, thread); });
  });
  error.check();
}

}  // namespace recast
