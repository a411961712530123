#include "train/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <limits>
#include <memory>
#include <numbers>
#include <thread>

#include "temp_folder.h"

namespace tilemoe::train {
namespace {

RunningMean mean_of(std::initializer_list<double> values) {
  RunningMean mean;
  for (const double value : values) mean.add(value);
  return mean;
}

std::string line_at_half(int width) {
  constexpr double kTwoBits = 2 * std::numbers::ln2;
  const StepReport report{.step = 300, .loss = kTwoBits, .tokens_per_second = 21'234};
  return status_text(step_parts(report, 600, mean_of({kTwoBits, kTwoBits}), "1m05s left"), 0.5,
                     width);
}

TEST(Progress, ShowsEverythingWhereThereIsRoom) {
  EXPECT_EQ(line_at_half(140),
            "[####################....................] step 300/600  2.000 bits/byte (mean of the "
            "last 2 steps)  1m05s left  21.2k tokens/s");
}

TEST(Progress, NeverExceedsTheWidth) {
  for (int width = 0; width < 150; ++width)
    EXPECT_LE(line_at_half(width).size(), static_cast<size_t>(width));
  EXPECT_EQ(line_at_half(70),
            "step 300/600  2.000 bits/byte (mean of the last 2 steps)  1m05s left");
  EXPECT_EQ(line_at_half(40), "step 300/600");
  EXPECT_EQ(line_at_half(6), "step 3");
}

// It never starts from zero, nor from what was before, and says of how many steps it is.
TEST(RunningMean, IsThatOfTheValuesThereAre) {
  EXPECT_EQ(mean_of({5}).mean(), 5);
  EXPECT_EQ(mean_of({5, 3}).mean(), 4);
  RunningMean mean;
  for (int i = 1; i <= 100; ++i) mean.add(i);
  EXPECT_EQ(mean.count(), RunningMean::kMax);
  EXPECT_DOUBLE_EQ(mean.mean(), 90.5);  // of 81 to 100
  const auto shown = [](const RunningMean& of) { return step_parts({}, 1, of, "").at(1); };
  EXPECT_TRUE(contains(shown(mean), "(mean of the last 20 steps)"));
  EXPECT_TRUE(contains(shown(mean_of({1})), "(this step)"));
}

TEST(Progress, DurationsAreShort) {
  EXPECT_EQ(short_duration(0.4), "0s");
  EXPECT_EQ(short_duration(59.4), "59s");
  EXPECT_EQ(short_duration(187), "3m07s");
  EXPECT_EQ(short_duration(7500), "2h05m");
  EXPECT_EQ(short_duration(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(short_duration(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(Progress, WritesPlainLinesToAFile) {
  TempFolder folder;
  std::FILE* file = std::fopen((folder / "out").c_str(), "w");
  ASSERT_NE(file, nullptr);
  {
    Progress progress({.first = 0, .total = 50}, file);
    for (int64_t step = 1; step <= 50; ++step)
      progress.update({.step = step, .loss = 1, .tokens_per_second = 10});
    progress.note("validation 2.0 bits per byte");
  }
  std::fclose(file);
  const std::string text = read_file(folder / "out");
  EXPECT_EQ(text.find('\r'), text.npos);
  EXPECT_EQ(text.find('\x1b'), text.npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << text;  // first, time, last, note
  EXPECT_TRUE(contains(text, "left: 44 steps and the evaluation\n"));
  EXPECT_TRUE(contains(text, "step 50/50"));
  EXPECT_TRUE(text.ends_with("validation 2.0 bits per byte\n"));
}

// The output for a terminal of `columns`.
template <class Use>
std::string on_terminal(unsigned short columns, Use&& use) {
  int master = -1, slave = -1;
  winsize size{.ws_row = 24, .ws_col = columns, .ws_xpixel = 0, .ws_ypixel = 0};
  if (::openpty(&master, &slave, nullptr, nullptr, &size) != 0)
    throw std::runtime_error("openpty failed");
  std::FILE* file = ::fdopen(slave, "w");
  use(file);
  std::fclose(file);
  std::string text;
  char chunk[4096];
  for (ssize_t got; (got = ::read(master, chunk, sizeof chunk)) > 0;)
    text.append(chunk, static_cast<size_t>(got));
  ::close(master);
  return text;
}

TEST(Progress, RedrawsOneLineOfATerminal) {
  constexpr unsigned short kColumns = 60;
  const std::string text = on_terminal(kColumns, [](std::FILE* file) {
    Progress progress({.first = 0, .total = 2}, file);
    progress.update({.step = 1, .loss = 1, .tokens_per_second = 10});
    progress.note("a note");
    progress.update({.step = 2, .loss = 1, .tokens_per_second = 10});
  });
  const std::string erase = "\r\x1b[K";
  EXPECT_TRUE(text.starts_with(erase + "step 1/2")) << text;
  EXPECT_TRUE(contains(text, erase + "a note\r\n"));
  EXPECT_TRUE(text.ends_with("\r\n"));
  size_t longest = 0;
  for (size_t at = 0; (at = text.find(erase, at)) != text.npos;) {
    at += erase.size();
    longest = std::max(longest, text.find('\r', at) - at);
  }
  EXPECT_LT(longest, kColumns);
  EXPECT_GT(longest, 30U);
}

}  // namespace
}  // namespace tilemoe::train
