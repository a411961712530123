// The order of writes to the disk: the log before the checkpoint that counts on it, a checkpoint
// before its name, its name before older ones go.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "temp_folder.h"
#include "train/checkpoint.h"
#include "train/log.h"
#include "train/run_folder.h"
#include "watched_calls.h"

namespace tilemoe::train {
namespace {

TEST(Durability, ACheckpointIsOnTheDiskBeforeItHasItsName) {
  TempFolder folder;
  RunFolder run(folder.path());
  run.set_options({{"keep", 1}});
  float values[3] = {1, 2, 3};
  const auto save = [&](int64_t step) {
    save_checkpoint(run, step, {{"w", {3}, values}}, {{"step", step}}, 1);
  };
  save(1);
  const auto calls = calls_of([&] { save(2); });
  const auto size = [&](const char* name) {
    return std::to_string(std::filesystem::file_size(folder / name));
  };
  const std::string newest = "step-00000002.safetensors";
  const std::vector<std::string> expected = {
      // The run knows the file as its own first.
      "sync run.json.unfinished " + size("run.json"),
      "rename run.json",
      "sync folder",
      "sync " + newest + ".unfinished " + size(newest.c_str()),
      "rename " + newest,
      "sync folder",
      "remove step-00000001.safetensors",
  };
  EXPECT_EQ(calls, expected);
}

TEST(Durability, ALogIsOnTheDiskWhenItSaysSo) {
  TempFolder folder;
  const auto calls = calls_of([&] {
    JsonLog log = JsonLog::create(folder / "log.jsonl");
    log.write({{"event", "start"}});
    log.sync();
  });
  const std::vector<std::string> expected = {"sync folder", "sync log.jsonl 18"};
  EXPECT_EQ(calls, expected);
}

}  // namespace
}  // namespace tilemoe::train
