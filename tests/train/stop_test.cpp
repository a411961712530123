#include "train/stop.h"

#include <gtest/gtest.h>

#include <csignal>

namespace tilemoe::train {
namespace {

// A shell starts a job in its background with SIGINT ignored, and nohup what it starts with SIGHUP.
[[maybe_unused]] const bool none_is_ignored = [] {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) std::signal(signal, SIG_DFL);
  return true;
}();

TEST(StopSignal, RemembersTheFirst) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
    StopSignal stop;
    EXPECT_FALSE(stop.requested());
    std::raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
}

TEST(StopSignalDeathTest, TheSecondEndsTheProcess) {
  for (const int first : {SIGINT, SIGTERM, SIGHUP})
    for (const int second : {SIGINT, SIGTERM, SIGHUP})
      EXPECT_EXIT(
          {
            StopSignal stop;
            std::raise(first);
            std::raise(second);
          },
          testing::KilledBySignal(second), "");
}

// Whoever reads our output is gone for every line of it.
TEST(StopSignal, AClosedPipeDoesNotEndTheProcess) {
  std::signal(SIGPIPE, SIG_DFL);
  {
    StopSignal stop;
    std::raise(SIGPIPE);
    std::raise(SIGPIPE);
    EXPECT_EQ(stop.signal(), SIGPIPE);
  }
  std::raise(SIGPIPE);  // what stdio writes at the end
  std::signal(SIGPIPE, SIG_DFL);
}

TEST(StopSignal, LeavesWhatIsIgnoredIgnored) {
  for (const int ignored : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
    const auto earlier = std::signal(ignored, SIG_IGN);
    {
      StopSignal stop;
      std::raise(ignored);
      EXPECT_FALSE(stop.requested());
      std::raise(ignored == SIGINT ? SIGTERM : SIGINT);
      EXPECT_TRUE(stop.requested());
      std::raise(ignored);  // still, after the first
    }
    EXPECT_EQ(std::signal(ignored, earlier), SIG_IGN);
  }
}

TEST(StopSignal, GivesTheSignalsBack) {
  static volatile std::sig_atomic_t seen = 0;
  const auto earlier = std::signal(SIGINT, [](int) { seen = 1; });
  { StopSignal stop; }
  std::raise(SIGINT);
  EXPECT_EQ(seen, 1);
  std::signal(SIGINT, earlier);
}

}  // namespace
}  // namespace tilemoe::train
