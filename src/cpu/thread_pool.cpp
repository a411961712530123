#include "cpu/thread_pool.h"

#include <omp.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

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

struct Job {
  int64_t tasks = 0;
  detail::TaskFunction function = nullptr;
  void* context = nullptr;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;

  void work(int worker) {
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks || failed.load(std::memory_order_relaxed)) return;
      try {
        function(context, task, worker);
      } catch (...) {
        if (!failed.exchange(true)) error = std::current_exception();
      }
    }
  }
};

class Pool {
 public:
  explicit Pool(int threads) {
    for (int worker = 1; worker < threads; ++worker)
      threads_.emplace_back([this, worker] { serve(worker); });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // False when another call is running.
  bool run(int64_t tasks, detail::TaskFunction function, void* context) {
    std::unique_lock one_job(job_mutex_, std::try_to_lock);
    if (!one_job.owns_lock()) return false;
    Job job;
    job.tasks = tasks, job.function = function, job.context = context;
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      ++generation_;
      running_ = static_cast<int>(threads_.size());
    }
    wake_.notify_all();
    job.work(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return running_ == 0; });
    job_ = nullptr;
    lock.unlock();
    one_job.unlock();
    if (job.error) std::rethrow_exception(job.error);
    return true;
  }

 private:
  void serve(int worker) {
    omp_set_num_threads(1);
    uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stopping_ || generation_ != seen; });
      if (stopping_) return;
      seen = generation_;
      Job* job = job_;
      lock.unlock();
      inside_task = true;
      job->work(worker);
      inside_task = false;
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex job_mutex_;  // held by the one call that runs
  std::mutex mutex_;      // guards what follows
  std::condition_variable wake_, done_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  int running_ = 0;
  bool stopping_ = false;

 public:
  static thread_local bool inside_task;
};

thread_local bool Pool::inside_task = false;

int hardware_threads() {
  const unsigned threads = std::thread::hardware_concurrency();
  return threads == 0 ? 1 : static_cast<int>(threads);
}

std::mutex pool_mutex;
std::unique_ptr<Pool> pool_owner;

Pool& pool() {
  std::lock_guard lock(pool_mutex);
  if (!pool_owner) pool_owner = std::make_unique<Pool>(hardware_threads());
  return *pool_owner;
}

}  // namespace

int num_threads() {
  return pool().size();
}

void set_num_threads(int threads) {
  std::lock_guard lock(pool_mutex);
  pool_owner.reset();
  pool_owner = std::make_unique<Pool>(threads == 0 ? hardware_threads() : threads);
}

namespace detail {

void run_tasks(int64_t tasks, TaskFunction function, void* context) {
  if (tasks <= 0) return;
  const SingleThreadedOpenMP guard;
  if (!Pool::inside_task && tasks > 1) {
    Pool::inside_task = true;
    struct Reset {
      ~Reset() { Pool::inside_task = false; }
    } reset;
    if (pool().run(tasks, function, context)) return;
  }
  for (int64_t task = 0; task < tasks; ++task) function(context, task, 0);
}

}  // namespace detail
}  // namespace tilemoe::cpu
