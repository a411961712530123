#include "train/stop.h"

#include <gtest/gtest.h>

#include <csignal>

namespace tilemoe::train {
namespace {

TEST(StopSignal, RemembersTheFirst) {
  for (const int signal : {SIGINT, SIGTERM}) {
    StopSignal stop;
    EXPECT_FALSE(stop.requested());
    std::raise(signal);
    EXPECT_TRUE(stop.requested());
    EXPECT_EQ(stop.signal(), signal);
  }
}

TEST(StopSignalDeathTest, TheSecondEndsTheProcess) {
  for (const int first : {SIGINT, SIGTERM})
    for (const int second : {SIGINT, SIGTERM})
      EXPECT_EXIT(
          {
            StopSignal stop;
            std::raise(first);
            std::raise(second);
          },
          testing::KilledBySignal(second), "");
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
