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

constexpr char kStart[] = "{\"event\":\"start\"}\n";
constexpr char kResume[] = "{\"event\":\"resume\"}\n";
constexpr char kFirst[] = "{\"event\":\"step\",\"step\":1}\n{\"event\":\"eval\",\"step\":1}\n";
constexpr char kSecond[] = "{\"event\":\"step\",\"step\":2}\n";

TEST(JsonLog, ResumingForgetsLaterSteps) {
  TempFolder folder;
  const std::string start = kStart, first = kFirst, second = kSecond;
  const auto kept = [&](const std::string& before, int64_t step) {
    write_file(folder / "log.jsonl", before);
    JsonLog::resume(folder / "log.jsonl", step).write({{"event", "resume"}});
    const std::string after = read_file(folder / "log.jsonl");
    EXPECT_TRUE(after.ends_with(kResume));
    return after.substr(0, after.size() - std::string(kResume).size());
  };
  EXPECT_EQ(kept(start + first + second, 2), start + first + second);
  EXPECT_EQ(kept(start + first + second, 1), start + first);
  EXPECT_EQ(kept(start + first + second, 0), start);
  EXPECT_EQ(kept(start + first + "{\"event\":\"step\",\"step\":2", 2), start + first);
  EXPECT_EQ(kept(start + first + "{\"st\n", 2), start + first) << "the last line, spoilt";
  EXPECT_EQ(kept(start + first + "\n", 2), start + first) << "the last line, blank";
  EXPECT_EQ(kept(start + second + first, 1), start) << "nothing that follows a later step";
  EXPECT_EQ(kept("", 5), "");
}

// A line that is broken and not the last was not cut short: what follows it is worth keeping.
TEST(JsonLog, RefusesToCutAtABrokenLine) {
  TempFolder folder;
  const auto path = folder / "log.jsonl";
  for (const std::string broken :
       {"\n", "{\"st\n", "17\n", "{\"step\":1}\n", "{\"event\":\"step\",\"step\":-1}\n",
        "{\"event\":\"step\",\"step\":1.5}\n", "{\"event\":7,\"step\":1}\n"})
    for (const int64_t step : {0, 1, 2}) {
      const std::string text = kStart + std::string(kFirst) + broken + kSecond;
      write_file(path, text);
      const std::string error = error_of([&] { JsonLog::resume(path, step); });
      EXPECT_TRUE(contains(error, path.string() + " line 4 ")) << broken;
      EXPECT_EQ(read_file(path), text);
    }
  write_file(path, kStart + std::string(1'000'000, '[') + "\n" + kSecond);
  EXPECT_TRUE(contains(error_of([&] { JsonLog::resume(path, 1); }), "line 2 is nested"));
}

TEST(JsonLog, LeavesOtherFilesAlone) {
  TempFolder folder;
  const auto path = folder / "notes.txt";
  write_file(path, "my notes\n");
  EXPECT_TRUE(contains(error_of([&] { JsonLog::create(path); }), "is not a training log"));
  EXPECT_TRUE(contains(error_of([&] { JsonLog::resume(path, 1); }), "is not a training log"));
  EXPECT_EQ(read_file(path), "my notes\n");
  write_file(path, kStart + std::string(kFirst));
  JsonLog::create(path).write({{"event", "start"}});
  EXPECT_EQ(read_file(path), kStart);
}

TEST(JsonLog, MayBeADevice) {
  JsonLog::create("/dev/null").write({{"event", "start"}});
  JsonLog log = JsonLog::resume("/dev/null", 5);
  log.write({{"event", "resume"}});
  EXPECT_NO_THROW(log.sync());
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
