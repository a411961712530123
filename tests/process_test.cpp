// The CPU backend's threads and their process: fork, exit, cancellation, and a system that starts
// no more threads.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "cpu/thread_pool.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {
namespace {

constexpr int kThreads = 4;
constexpr int kWrong = 3;  // exit status of a child whose check failed

bool computes() {
  std::atomic<int64_t> sum{0};
  parallel_for(1000, [&](int64_t task, int) { sum += task; });
  return sum == 999 * 1000 / 2;
}

// The end of `body` in a child of fork(): its exit status, or "signal 11", or "hangs".
template <class Body>
std::string end_of_child(Body&& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    body();
    std::exit(0);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return "hangs";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                             : std::to_string(WEXITSTATUS(status));
}

void require(bool condition) {
  if (!condition) ::_exit(kWrong);
}

class Process : public testing::Test {
 protected:
  void SetUp() override {
    set_num_threads(kThreads);
    ASSERT_TRUE(computes());
  }
  void TearDown() override { set_num_threads(0); }
};

TEST_F(Process, AForkedChildEndsWithoutComputing) {
  EXPECT_EQ(end_of_child([] {}), "0");
}

TEST_F(Process, AForkedChildHasItsOwnThreads) {
  const auto compute = [] {
    require(num_threads() == kThreads);
    for (int round = 0; round < 100; ++round) require(computes());
    // All at once: num_threads() of them.
    std::atomic<int> begun{0};
    parallel_for(kThreads, [&](int64_t, int) {
      for (++begun; begun < kThreads;) std::this_thread::yield();
    });
  };
  EXPECT_EQ(end_of_child(compute), "0");
  EXPECT_EQ(end_of_child([&] {
              compute();
              require(end_of_child(compute) == "0");  // and its own child
              compute();
            }),
            "0");
  EXPECT_TRUE(computes());
}

TEST_F(Process, AForkedChildChangesItsThreads) {
  for (const int threads : {1, 3})
    EXPECT_EQ(end_of_child([threads] {
                require(tilemoe_set_num_threads(threads) == TILEMOE_SUCCESS);
                require(tilemoe_num_threads() == threads);
                require(computes());
              }),
              "0");
  EXPECT_EQ(num_threads(), kThreads);
}

// The fork happens while other threads are in a call or wait for the pool's mutex.
TEST_F(Process, AForkWhileOthersCompute) {
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (int other = 0; other < 2; ++other)
    others.emplace_back([&done] {
      while (!done) computes();
    });
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(end_of_child([] {
                require(num_threads() == kThreads);
                require(computes());
              }),
              "0");
  done = true;
  for (std::thread& other : others) other.join();
}

TEST_F(Process, AForkWhileThreadsChange) {
  std::atomic<bool> done{false};
  std::thread other([&done] {
    while (!done) set_num_threads(2), set_num_threads(kThreads);
  });
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(end_of_child([] {
                require(computes());
                require(num_threads() == 2 || num_threads() == kThreads);
              }),
              "0");
  done = true;
  other.join();
}

// Without oneDNN, which frees the code that it generated while others may run it.
TEST_F(Process, ExitWhileOthersCompute) {
  for (int round = 0; round < 20; ++round)
    EXPECT_EQ(end_of_child([round] {
                for (int other = 0; other < 2; ++other)
                  std::thread([] {
                    for (;;) computes();
                  }).detach();
                std::this_thread::sleep_for(std::chrono::milliseconds(round));
              }),
              "0");
}

TEST_F(Process, ExitFromATask) {
  EXPECT_EQ(end_of_child([] {
              parallel_for(100, [](int64_t task, int) {
                if (task == 50) std::exit(7);
              });
            }),
            "7");
}

// Cancellation waits for the end of a call.
TEST_F(Process, ACancelledThreadEndsItsCall) {
  for (int round = 0; round < 10; ++round) {
    std::atomic<bool> begun{false};
    struct Calls {
      std::atomic<bool>& begun;
      std::atomic<int64_t> tasks{0};
    } calls{begun};
    pthread_t thread{};
    ASSERT_EQ(pthread_create(
                  &thread, nullptr,
                  [](void* context) -> void* {
                    auto& own = *static_cast<Calls*>(context);
                    for (;;) {
                      parallel_for(8, [&](int64_t, int) {
                        own.begun = true;
                        std::this_thread::sleep_for(std::chrono::milliseconds(1));
                        ++own.tasks;
                      });
                      pthread_testcancel();
                    }
                  },
                  &calls),
              0);
    while (!begun) std::this_thread::yield();
    ASSERT_EQ(pthread_cancel(thread), 0);
    void* result = nullptr;
    ASSERT_EQ(pthread_join(thread, &result), 0);
    EXPECT_EQ(result, PTHREAD_CANCELED);
    EXPECT_EQ(calls.tasks % 8, 0);
  }
  EXPECT_TRUE(computes());
}

// ------------------------------------------------------------ if the system starts no threads

// Stacks larger than any memory.
void refuse_threads() {
  pthread_attr_t attributes;
  require(pthread_attr_init(&attributes) == 0);
  require(pthread_attr_setstacksize(&attributes, size_t{1} << 50) == 0);
  require(pthread_setattr_default_np(&attributes) == 0);
}

TEST_F(Process, ContinuesWithoutNewThreads) {
  EXPECT_EQ(end_of_child([] {
              refuse_threads();
              require(num_threads() == 1);  // of kThreads, as the parent had
              require(computes());
              require(tilemoe_set_num_threads(3) == TILEMOE_DEVICE_ERROR);
              const std::string error = tilemoe_last_error();
              require(error.find("threads is 3, but the system started only 1") != error.npos);
              require(tilemoe_num_threads() == 1);
              require(computes());
              require(tilemoe_set_num_threads(1) == TILEMOE_SUCCESS);
            }),
            "0");
}

TEST_F(Process, ContinuesWithTheThreadsThatStarted) {
  EXPECT_EQ(end_of_child([] {
              int64_t pages = 0;
              std::ifstream("/proc/self/statm") >> pages;
              pthread_attr_t attributes;
              size_t stack = 0;
              require(pthread_getattr_default_np(&attributes) == 0);
              require(pthread_attr_getstacksize(&attributes, &stack) == 0);
              const rlimit limit{
                  .rlim_cur = static_cast<rlim_t>(pages * ::getpagesize()) + stack * 5 / 2,
                  .rlim_max = RLIM_INFINITY};
              require(::setrlimit(RLIMIT_AS, &limit) == 0);
              require(tilemoe_set_num_threads(64) == TILEMOE_DEVICE_ERROR);
              require(num_threads() > 1 && num_threads() < 64);
              for (int round = 0; round < 100; ++round) require(computes());
            }),
            "0");
}

}  // namespace
}  // namespace tilemoe::cpu
