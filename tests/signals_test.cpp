// Signals while the CPU backend computes: they wait, and a handler runs on its thread's own stack
// (cpu/blocked_signals.h says what happened otherwise).
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

sigset_t blocked_now() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return blocked;
}

void expect_only_faults_pass() {
  const sigset_t blocked = blocked_now();
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGALRM, SIGPROF, SIGUSR1, SIGCHLD})
    EXPECT_EQ(sigismember(&blocked, signal), 1) << "signal " << signal;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
    EXPECT_EQ(sigismember(&blocked, signal), 0) << "signal " << signal;
}

class Signals : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { set_num_threads(GetParam()); }
  void TearDown() override { set_num_threads(0); }
};

TEST_P(Signals, WaitWhileTasksRun) {
  for (const int64_t tasks : {1, 100})
    parallel_for(tasks, [](int64_t, int) { expect_only_faults_pass(); });
}

// A task that continues only when all have begun is the only one of its worker.
TEST_P(Signals, WaitOnEveryWorker) {
  std::atomic<int> begun{0};
  parallel_for(GetParam(), [&](int64_t, int) {
    for (++begun; begun < GetParam();) std::this_thread::yield();
    expect_only_faults_pass();
    parallel_for(2, [](int64_t, int) {});
    expect_only_faults_pass();
  });
}

TEST_P(Signals, AreBlockedAfterwardsAsTheyWereBefore) {
  sigset_t quit;
  sigemptyset(&quit);
  sigaddset(&quit, SIGQUIT);
  sigset_t before;
  pthread_sigmask(SIG_BLOCK, &quit, &before);
  const auto expect_quit_alone = [] {
    const sigset_t blocked = blocked_now();
    EXPECT_EQ(sigismember(&blocked, SIGQUIT), 1);
    EXPECT_EQ(sigismember(&blocked, SIGINT), 0);
  };
  parallel_for(10, [](int64_t, int) {});
  expect_quit_alone();
  EXPECT_THROW(parallel_for(10, [](int64_t, int) { throw std::runtime_error("a task"); }),
               std::runtime_error);
  expect_quit_alone();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

INSTANTIATE_TEST_SUITE_P(, Signals, testing::Values(1, 2, 5), testing::PrintToStringParamName());

// ---------------------------------------------------------------- a handler's stack frame

uintptr_t stack_begin, stack_end;  // of the thread that takes the signals
std::atomic<int> taken, taken_off_stack;

void note_frame(int) {
  const auto frame = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  ++taken;
  if (frame < stack_begin || frame >= stack_end) ++taken_off_stack;
}

void find_own_stack() {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_getattr_np(pthread_self(), &attributes), 0);
  void* low = nullptr;
  size_t bytes = 0;
  ASSERT_EQ(pthread_attr_getstack(&attributes, &low, &bytes), 0);
  pthread_attr_destroy(&attributes);
  stack_begin = reinterpret_cast<uintptr_t>(low);
  stack_end = stack_begin + bytes;
}

Matrix matrix_of(std::vector<float>& values, int64_t columns) {
  Matrix matrix;
  matrix.data = reinterpret_cast<char*>(values.data());
  matrix.dtype = TILEMOE_FLOAT32;
  matrix.row_stride = columns;
  matrix.column_stride = 1;
  return matrix;
}

// GEMMs of the size at which oneDNN does not pack, and with more terms than fit its own stack
// frame.
TEST(SignalHandlers, RunOnTheirThreadsStack) {
  constexpr int64_t kRows = 64, kColumns = 256, kDepth = 1024;
  constexpr int kEnough = 200;
  std::vector<float> a(kRows * kDepth, 1.0f), b(kDepth * kColumns, 1.0f), c(kRows * kColumns);
  std::vector<float> panels(static_cast<size_t>(panel_floats(kRows, kColumns, kDepth)));
  const Matrix A = matrix_of(a, kDepth), B = matrix_of(b, kColumns);
  find_own_stack();
  taken = taken_off_stack = 0;
  struct sigaction note {};
  struct sigaction before {};
  note.sa_handler = note_frame;
  note.sa_flags = SA_RESTART;
  ASSERT_EQ(sigaction(SIGUSR1, &note, &before), 0);

  std::atomic<bool> done{false};
  std::thread sender([&done, receiver = pthread_self()] {
    while (!done) {
      pthread_kill(receiver, SIGUSR1);
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (taken < kEnough && std::chrono::steady_clock::now() < end)
    parallel_for(4, [&](int64_t, int worker) {
      if (worker != 0) return;
      multiply(kRows, kColumns, kDepth, A, B, /*add=*/false, c.data(), kColumns, panels.data());
    });
  done = true;
  sender.join();
  sigaction(SIGUSR1, &before, nullptr);
  EXPECT_GE(taken, kEnough);
  EXPECT_EQ(taken_off_stack, 0);
  EXPECT_EQ(c.front(), static_cast<float>(kDepth));
}

}  // namespace
}  // namespace tilemoe::cpu
