#include "cpu/thread_pool.h"

#include <hwy/cache_control.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/check.h"
#include "cpu/blocked_signals.h"

namespace tilemoe::cpu {
namespace {

// oneDNN may be built on OpenMP; inside a task it must stay on the thread that called it.
class SingleThreadedOpenMP {
 public:
  SingleThreadedOpenMP() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SingleThreadedOpenMP() { omp_set_num_threads(before_); }
  SingleThreadedOpenMP(const SingleThreadedOpenMP&) = delete;
  SingleThreadedOpenMP& operator=(const SingleThreadedOpenMP&) = delete;

 private:
  int before_;
};

// Steps follow each other closely, and waking a thread costs about as much as a short step takes;
// so a thread polls for this time before it sleeps, and yields its core meanwhile.
constexpr std::chrono::microseconds kSpinTime{50};

template <class Condition>
bool look_out_for(Condition&& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      hwy::Pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// As variable.wait(lock, condition), which libstdc++ 12 makes a symbol that the libstdc++ of glibc
// 2.34's distributions lacks. A cancelled thread leaves it as it leaves that.
template <class Condition>
void await(std::condition_variable& variable, std::unique_lock<std::mutex>& lock,
           Condition&& condition) {
  while (!condition()) pthread_cond_wait(variable.native_handle(), lock.mutex()->native_handle());
}

class Job {
 public:
  void set(int64_t tasks, detail::TaskFunction function, void* context) {
    tasks_ = tasks, function_ = function, context_ = context;
    next_.store(0, std::memory_order_relaxed);
    failed_.store(false, std::memory_order_relaxed);
    error_ = nullptr;
  }

  // Runs tasks until none is left to start. After a failure no other is started.
  void work(int worker) {
    while (!failed_.load(std::memory_order_relaxed)) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks_) return;
      try {
        function_(context_, task, worker);
      } catch (...) {
        if (!failed_.exchange(true)) error_ = std::current_exception();
      }
    }
  }

  // Once every worker is back.
  std::exception_ptr take_error() { return std::exchange(error_, nullptr); }

 private:
  int64_t tasks_ = 0;
  detail::TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

// The state that a call and the workers share, in one word: the number of the call, the number of
// workers that it wants, whether it is closed, and the number of workers inside. A worker enters an
// open call only, and the caller closes it when no task is left to start; so the caller waits for
// those who are inside, never for one that is still waking up, and the job outlives every use.
struct CallWord {
  static constexpr uint64_t kInside = 0xffff;  // 16 bits
  static constexpr uint64_t kClosed = uint64_t{1} << 16;
  static constexpr int kWantedShift = 17;    // 16 bits
  static constexpr uint64_t kStop = 0xffff;  // in place of a number of workers
  static constexpr int kNumberShift = 33;

  static uint64_t open(uint64_t number, uint64_t wanted) {
    return number << kNumberShift | wanted << kWantedShift;
  }
  static uint64_t number(uint64_t word) { return word >> kNumberShift; }
  static uint64_t wanted(uint64_t word) { return word >> kWantedShift & 0xffff; }
  static bool is_closed(uint64_t word) { return (word & kClosed) != 0; }
  static uint64_t inside(uint64_t word) { return word & kInside; }
};

class Pool {
 public:
  // Starts `threads` threads, or as many as the system allows; why_fewer() has the reason.
  explicit Pool(int threads) {
    const BlockedSignals blocked;  // a worker begins with what this thread holds
    threads_.reserve(static_cast<size_t>(threads - 1));
    try {
      for (int worker = 1; worker < threads; ++worker)
        threads_.emplace_back([this, worker] { serve(static_cast<uint64_t>(worker)); });
    } catch (const std::system_error& error) {
      why_fewer_ = error.code();
    } catch (const std::bad_alloc&) {
      why_fewer_ = std::make_error_code(std::errc::not_enough_memory);
    }
  }

  ~Pool() { end_workers(); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }
  std::error_code why_fewer() const { return why_fewer_; }

  // Ends the workers unless a call is running. Later calls find the pool busy for good.
  void close_if_idle() {
    if (!inside_task && call_mutex_.try_lock()) end_workers();
  }

  // False when another call is running.
  bool run(int64_t tasks, detail::TaskFunction function, void* context) {
    std::unique_lock one_call(call_mutex_, std::try_to_lock);
    if (!one_call.owns_lock()) return false;
    job_.set(tasks, function, context);
    announce(static_cast<uint64_t>(std::min<int64_t>(tasks - 1, size() - 1)));
    job_.work(0);
    word_.fetch_or(CallWord::kClosed, std::memory_order_relaxed);
    const auto nobody_inside = [this] {
      return CallWord::inside(word_.load(std::memory_order_acquire)) == 0;
    };
    if (!look_out_for(nobody_inside)) {
      std::unique_lock lock(sleep_mutex_);
      await(left_, lock, nobody_inside);
    }
    const std::exception_ptr error = job_.take_error();
    one_call.unlock();
    if (error) std::rethrow_exception(error);
    return true;
  }

 private:
  void end_workers() {
    announce(CallWord::kStop);
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }

  void announce(uint64_t wanted) {
    {
      std::lock_guard lock(sleep_mutex_);  // nobody falls asleep between this and the notification
      const uint64_t number = CallWord::number(word_.load(std::memory_order_relaxed)) + 1;
      word_.store(CallWord::open(number, wanted), std::memory_order_release);
    }
    announced_.notify_all();
  }

  // Waits for a call after number `seen`.
  uint64_t next_call(uint64_t seen) {
    uint64_t word = 0;
    const auto is_new = [&] {
      word = word_.load(std::memory_order_acquire);
      return CallWord::number(word) != seen;
    };
    if (!look_out_for(is_new)) {
      std::unique_lock lock(sleep_mutex_);
      await(announced_, lock, is_new);
    }
    return word;
  }

  void serve(uint64_t worker) {
    const BlockedSignals blocked;  // for good: the program's own threads take them
    omp_set_num_threads(1);
    inside_task = true;
    uint64_t seen = 0;
    for (;;) {
      uint64_t word = next_call(seen);
      seen = CallWord::number(word);
      if (CallWord::wanted(word) == CallWord::kStop) return;
      if (enter(word, worker)) {
        job_.work(static_cast<int>(worker));
        leave();
      }
    }
  }

  bool enter(uint64_t word, uint64_t worker) {
    const uint64_t call = CallWord::number(word);
    while (CallWord::number(word) == call && !CallWord::is_closed(word) &&
           worker <= CallWord::wanted(word))
      if (word_.compare_exchange_weak(word, word + 1, std::memory_order_acquire)) return true;
    return false;
  }

  void leave() {
    const uint64_t word = word_.fetch_sub(1, std::memory_order_release) - 1;
    if (CallWord::inside(word) > 0 || !CallWord::is_closed(word)) return;
    std::lock_guard lock(sleep_mutex_);
    left_.notify_one();
  }

  std::vector<std::thread> threads_;
  std::error_code why_fewer_;
  std::mutex call_mutex_;   // held by the one call that runs
  std::mutex sleep_mutex_;  // held to announce a call, and to fall asleep
  std::condition_variable announced_, left_;
  std::atomic<uint64_t> word_{CallWord::kClosed};
  Job job_;

 public:
  static thread_local bool inside_task;
};

thread_local bool Pool::inside_task = false;

int hardware_threads() {
  const unsigned threads = std::thread::hardware_concurrency();
  return threads == 0 ? 1 : static_cast<int>(threads);
}

std::mutex pool_mutex;  // held to start a pool and to end it
std::atomic<Pool*> current_pool{nullptr};
int threads_to_start = 0;  // of the next pool; 0 for one per core

// The pool of this process, started at the first use. Null if it has no memory: the caller then
// works alone.
Pool* pool() noexcept {
  if (Pool* const started = current_pool.load(std::memory_order_acquire)) return started;
  std::lock_guard lock(pool_mutex);
  Pool* started = current_pool.load(std::memory_order_relaxed);
  if (started) return started;
  try {
    started = new Pool(threads_to_start == 0 ? hardware_threads() : threads_to_start);
  } catch (const std::exception&) {
    return nullptr;
  }
  current_pool.store(started, std::memory_order_release);
  return started;
}

// A child of fork() has the thread that called it and no other: its parent's workers do not exist
// in the child and cannot be joined, and a mutex that one of the other threads held stays held. So
// a child leaves them in place, and starts a pool of as many threads when it first computes. Its
// parent's is kept in sight of leak checkers.
[[maybe_unused]] Pool* parents_pool = nullptr;
void leave_parents_pool() {
  new (&pool_mutex) std::mutex;
  if (Pool* const left = current_pool.exchange(nullptr, std::memory_order_relaxed)) {
    threads_to_start = left->size();
    parents_pool = left;
  }
}
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, leave_parents_pool);

// At exit() other threads may still compute, or begin to: a pool is only emptied here, so that what
// they hold stays. After dlclose() no worker runs code that is gone.
struct CloseAtExit {
  ~CloseAtExit() {
    const std::unique_lock lock(pool_mutex, std::try_to_lock);
    Pool* const started = current_pool.load(std::memory_order_acquire);
    if (lock.owns_lock() && started) started->close_if_idle();
  }
} close_at_exit;

}  // namespace

int num_threads() noexcept {
  const Pool* const started = pool();
  return started ? started->size() : 1;
}

void set_num_threads(int threads) {
  const BlockedSignals blocked;
  {
    std::lock_guard lock(pool_mutex);
    threads_to_start = threads;
    delete current_pool.exchange(nullptr, std::memory_order_acquire);
  }
  const int wanted = threads == 0 ? hardware_threads() : threads;
  const Pool* const started = pool();
  const std::error_code why =
      started ? started->why_fewer() : std::make_error_code(std::errc::not_enough_memory);
  TILEMOE_CHECK_AS(Status::kDeviceError, !why,
                   "threads is " << wanted << ", of which the system started "
                                 << (started ? started->size() : 1) << ": " << why.message());
}

namespace detail {

void run_tasks(int64_t tasks, TaskFunction function, void* context) {
  if (tasks <= 0) return;
  const BlockedSignals blocked;
  const SingleThreadedOpenMP guard;
  if (!Pool::inside_task && tasks > 1) {
    Pool::inside_task = true;
    struct Reset {
      ~Reset() { Pool::inside_task = false; }
    } reset;
    Pool* const started = pool();
    if (started && started->run(tasks, function, context)) return;
  }
  for (int64_t task = 0; task < tasks; ++task) function(context, task, 0);
}

}  // namespace detail
}  // namespace tilemoe::cpu
