// The CPU backend's threads: every task once, workers never shared, exceptions, nesting, several
// callers.
#include "cpu/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace tilemoe::cpu {
namespace {

// Restores one thread per core after a test that changed it.
class ThreadPool : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};

TEST_P(ThreadPool, HasTheRequestedThreads) {
  EXPECT_EQ(num_threads(), GetParam());
}

TEST_P(ThreadPool, RunsEveryTaskOnce) {
  for (int64_t tasks : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> runs(static_cast<size_t>(tasks));
    parallel_for(tasks, [&](int64_t task, int worker) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, num_threads());
      ++runs[static_cast<size_t>(task)];
    });
    for (int64_t task = 0; task < tasks; ++task)
      EXPECT_EQ(runs[static_cast<size_t>(task)], 1) << "task " << task << " of " << tasks;
  }
}

TEST_P(ThreadPool, NoTasksForANegativeNumber) {
  parallel_for(-1, [](int64_t, int) { ADD_FAILURE() << "a task ran"; });
}

TEST_P(ThreadPool, NoTwoRunningTasksShareAWorker) {
  std::vector<std::atomic<int>> inside(static_cast<size_t>(GetParam()));
  parallel_for(500, [&](int64_t, int worker) {
    auto& count = inside[static_cast<size_t>(worker)];
    EXPECT_EQ(count.fetch_add(1), 0);
    std::this_thread::yield();
    count.fetch_sub(1);
  });
}

// The data that tasks wrote is visible to the caller afterwards, and to the tasks of the next call.
TEST_P(ThreadPool, PublishesWhatTasksWrote) {
  std::vector<int64_t> values(257, 0);
  for (int round = 0; round < 200; ++round)
    parallel_for(static_cast<int64_t>(values.size()), [&](int64_t task, int) {
      values[values.size() - 1 - static_cast<size_t>(task)] += task;
    });
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(values[i], 200 * static_cast<int64_t>(values.size() - 1 - i));
}

TEST_P(ThreadPool, ThrowsTheFirstExceptionAndContinues) {
  for (int64_t thrower : {0, 3, 99}) {
    try {
      parallel_for(100, [&](int64_t task, int) {
        if (task == thrower) throw std::runtime_error("task " + std::to_string(task));
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "task " + std::to_string(thrower));
    }
    int done = 0;
    parallel_for(1, [&](int64_t, int) { ++done; });
    EXPECT_EQ(done, 1);
  }
}

TEST_P(ThreadPool, EveryTaskThrows) {
  for (int round = 0; round < 50; ++round)
    EXPECT_THROW(parallel_for(64, [](int64_t, int) { throw std::logic_error("each"); }),
                 std::logic_error);
}

TEST_P(ThreadPool, NestedCallsRunWhereTheyAre) {
  std::atomic<int64_t> sum{0};
  parallel_for(20, [&](int64_t outer, int) {
    const auto thread = std::this_thread::get_id();
    parallel_for(10, [&](int64_t inner, int worker) {
      EXPECT_EQ(std::this_thread::get_id(), thread);
      EXPECT_EQ(worker, 0);
      sum += outer * inner;
    });
  });
  EXPECT_EQ(sum, 190 * 45);
}

TEST_P(ThreadPool, ExceptionsLeaveANestedCall) {
  EXPECT_THROW(parallel_for(4,
                            [](int64_t, int) {
                              parallel_for(4, [](int64_t inner, int) {
                                if (inner == 2) throw std::runtime_error("inner");
                              });
                            }),
               std::runtime_error);
}

TEST_P(ThreadPool, ServesSeveralCallersAtOnce) {
  constexpr int kCallers = 4;
  std::vector<int64_t> sums(kCallers, 0);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller)
    callers.emplace_back([&sums, caller] {
      for (int round = 0; round < 100; ++round) {
        std::vector<int64_t> values(33, 0);
        parallel_for(33, [&](int64_t task, int) { values[static_cast<size_t>(task)] = task + 1; });
        for (int64_t value : values) sums[static_cast<size_t>(caller)] += value;
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (int64_t sum : sums) EXPECT_EQ(sum, 100 * 33 * 34 / 2);
}

INSTANTIATE_TEST_SUITE_P(, ThreadPool, testing::Values(1, 2, 3, 8),
                         testing::PrintToStringParamName());

TEST(ThreadPoolSize, ZeroIsOnePerCore) {
  set_num_threads(0);
  const auto cores = std::thread::hardware_concurrency();
  EXPECT_EQ(num_threads(), cores == 0 ? 1 : static_cast<int>(cores));
}

TEST(ThreadPoolSize, ChangesBetweenCalls) {
  for (int threads : {1, 5, 2, 5, 1, 0}) {
    set_num_threads(threads);
    std::atomic<int64_t> sum{0};
    parallel_for(100, [&](int64_t task, int) { sum += task; });
    EXPECT_EQ(sum, 4950);
  }
}

}  // namespace
}  // namespace tilemoe::cpu
