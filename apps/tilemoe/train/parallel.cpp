#include "train/parallel.h"

#include <omp.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tilemoe/tilemoe.h"

#if __has_include("layer_plan.h") || __has_include("cpu/thread_pool.h")
#error "The trainer uses the library as it is installed: src/ must not be on its include path."
#endif

namespace tilemoe::train {
namespace {

// All signals but those of the thread's own faults. oneDNN's GEMMs without packing point the
// stack register at the heap (uxlfoundation/oneDNN#4845), so that no handler may run inside of them.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      sigdelset(&blocked, fault);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

// A call is open while it has tasks to start. Workers enter an open call only, so the caller waits
// for those inside, and for none that is still waking up.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int worker = 1; worker < threads; ++worker)
      threads_.emplace_back([this, worker] { serve(worker); });
  }
  ~Pool() {
    announce(kEnd);
    for (std::thread& thread : threads_) thread.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  void run(int64_t tasks, const std::function<void(int64_t, int)>& body) {
    tasks_ = tasks, body_ = &body, next_ = 0, error_ = nullptr;
    announce(call_ + 1);
    work(0);
    std::unique_lock lock(mutex_);
    open_ = false;
    left_.wait(lock, [this] { return inside_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  static constexpr int64_t kEnd = -1;
  // Loops follow each other closely, and waking a thread takes about as long as a short one.
  static constexpr std::chrono::microseconds kSpinTime{50};

  void announce(int64_t call) {
    const std::lock_guard lock(mutex_);
    open_ = call != kEnd;
    call_ = call;
    announced_.notify_all();
  }

  // Runs tasks until none is left to start; after a failure no other is started.
  void work(int worker) {
    for (int64_t task; (task = next_++) < tasks_;) try {
        (*body_)(task, worker);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
        next_ = tasks_;
      }
  }

  void serve(int worker) {
    omp_set_num_threads(1);
    for (int64_t seen = 0;;) {
      const auto end = std::chrono::steady_clock::now() + kSpinTime;
      while (call_ == seen && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      std::unique_lock lock(mutex_);
      announced_.wait(lock, [&] { return call_ != seen; });
      seen = call_;
      if (seen == kEnd) return;
      if (!open_) continue;
      ++inside_;
      lock.unlock();
      work(worker);
      lock.lock();
      if (--inside_ == 0) left_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable announced_, left_;
  std::atomic<int64_t> call_{0}, next_{0};
  bool open_ = false;
  int inside_ = 0;
  int64_t tasks_ = 0;
  const std::function<void(int64_t, int)>* body_ = nullptr;
  std::exception_ptr error_;
};

}  // namespace

int num_threads() {
  return std::max(1, tilemoe_num_threads());
}

void parallel_for(int64_t tasks, const std::function<void(int64_t task, int worker)>& body) {
  static std::unique_ptr<Pool> pool;
  const BlockedSignals blocked;  // a worker begins with what this thread holds
  omp_set_num_threads(1);  // oneDNN may be built on OpenMP, and stays on the thread that calls it
  const int threads = num_threads();
  if (!pool || pool->size() != threads) {
    pool.reset();
    pool = std::make_unique<Pool>(threads);
  }
  pool->run(tasks, body);
}

}  // namespace tilemoe::train
