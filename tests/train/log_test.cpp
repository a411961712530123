#include "train/log.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "temp_folder.h"

namespace tilemoe::train {
namespace {

TEST(JsonLog, WritesOneObjectALineAtOnce) {
  TempFolder folder;
  JsonLog log = JsonLog::create(folder / "log.jsonl");
  log.write({{"event", "start"}, {"a", 1}});
  log.write(
      {{"step", 1}, {"loss", std::numeric_limits<double>::quiet_NaN()}, {"text", "a\nb\xff"}});
  EXPECT_EQ(read_file(folder / "log.jsonl"),
            "{\"event\":\"start\",\"a\":1}\n"
            "{\"step\":1,\"loss\":null,\"text\":\"a\\nb\xef\xbf\xbd\"}\n");
}

TEST(JsonLog, ResumingForgetsLaterSteps) {
  TempFolder folder;
  const std::string start = "{\"event\":\"start\"}\n";
  const std::string first = "{\"step\":1}\n{\"event\":\"eval\",\"step\":1}\n",
                    second = "{\"step\":2}\n";
  const auto kept = [&](const std::string& before, int64_t step) {
    write_file(folder / "log.jsonl", before);
    JsonLog::resume(folder / "log.jsonl", step).write({{"event", "resume"}});
    const std::string after = read_file(folder / "log.jsonl");
    const std::string resume = "{\"event\":\"resume\"}\n";
    EXPECT_TRUE(after.ends_with(resume));
    return after.substr(0, after.size() - resume.size());
  };
  EXPECT_EQ(kept(start + first + second, 2), start + first + second);
  EXPECT_EQ(kept(start + first + second, 1), start + first);
  EXPECT_EQ(kept(start + first + second, 0), start);
  EXPECT_EQ(kept(start + first + "{\"step\":2", 2), start + first) << "a line cut short";
  EXPECT_EQ(kept(start + first + "{\"st\n" + second, 2), start + first) << "a spoilt line";
  EXPECT_EQ(kept("", 5), "");
}

TEST(JsonLog, ResumingWithoutALogBeginsOne) {
  TempFolder folder;
  JsonLog::resume(folder / "log.jsonl", 5).write({{"step", 6}});
  EXPECT_EQ(read_file(folder / "log.jsonl"), "{\"step\":6}\n");
}

TEST(JsonLog, SaysWhenItCannotBeWritten) {
  EXPECT_TRUE(contains(error_of([] { JsonLog::create("/nowhere/log.jsonl"); }),
                       "cannot write /nowhere/log.jsonl"));
  EXPECT_TRUE(contains(error_of([] {
                         JsonLog::create("/dev/full").write({{"a", 1}});
                       }),
                       "cannot write /dev/full: No space left on device"));
}

}  // namespace
}  // namespace tilemoe::train
