// A run as a user sees it: what it keeps, what it refuses, and in which order it writes.
#include "train/run.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "small_model.h"
#include "temp_folder.h"
#include "watched_calls.h"

namespace tilemoe::train {
namespace {

class Run : public testing::Test {
 protected:
  Run() {
    options_.out = run_;
    options_.save_every = 2;
    config_.schedule = {.steps = 6, .warm_up = 0};
  }
  void train() {
    TrainingRun(
        config_, options_, corpus_,
        {.options = nlohmann::json::object(), .kept = {{"keep", options_.keep}}, .changed = {}})
        .train();
  }
  void resume() {
    options_.resume = run_;
    options_.out.clear();
    train();
  }

  TempFolder folder_;
  const std::filesystem::path run_ = folder_ / "run";
  TrainerConfig config_ = small_config();
  RunOptions options_;
  Corpus corpus_ = small_corpus();
};

TEST_F(Run, HasItsLogOnTheDiskBeforeACheckpoint) {
  const std::vector<std::string> calls = calls_of([&] { train(); });
  int64_t checkpoints = 0;
  uintmax_t synced = 0;
  const std::string log = read_file(run_ / "log.jsonl");
  for (const std::string& call : calls) {
    if (call.starts_with("sync log.jsonl ")) synced = std::stoull(call.substr(15));
    if (!call.starts_with("rename step-")) continue;
    const int64_t step = std::stoll(call.substr(12));
    const size_t line = log.find("\"event\":\"step\",\"step\":" + std::to_string(step) + ",");
    ASSERT_NE(line, log.npos);
    EXPECT_GE(synced, log.find('\n', line) + 1) << call;
    ++checkpoints;
  }
  EXPECT_EQ(checkpoints, 3);
}

// Weights that are not finite: the loss of the next step shows it, but the next step may be far.
TEST_F(Run, ReplacesNoCheckpointByOneThatIsNotFinite) {
  options_.keep = 1;
  train();
  ASSERT_EQ(list_checkpoints(run_).size(), 1U);
  const auto newest = list_checkpoints(run_).front();
  const std::string before = read_file(newest.path);
  config_.schedule.steps = 20;
  config_.optimizer.learning_rate = 1e39;  // to infinity in one step
  options_.save_every = 1;
  EXPECT_TRUE(contains(error_of([&] { resume(); }), "step 7 was not saved"));
  ASSERT_EQ(list_checkpoints(run_).size(), 1U);
  EXPECT_EQ(read_file(newest.path), before);
}

TEST_F(Run, LeavesTheTextAlone) {
  const auto text = folder_ / "text.txt";
  write_file(text, "{\"event\": a text that begins like a log\n");
  corpus_.names = {(folder_ / "./text.txt").string()};
  options_.log = text.string();
  EXPECT_TRUE(contains(error_of([&] { train(); }), "is a file of --text"));
  EXPECT_EQ(read_file(text), "{\"event\": a text that begins like a log\n");
}

TEST_F(Run, RefusesAFolderWithLaterCheckpointsOfOthers) {
  train();
  const auto checkpoints = list_checkpoints(run_);
  ASSERT_EQ(checkpoints.size(), 2U);
  const auto other = folder_ / "other";
  std::filesystem::create_directory(other);
  for (const CheckpointFile& file : checkpoints)
    std::filesystem::copy_file(file.path, other / file.path.filename());
  options_.out.clear();
  options_.resume = other / checkpoints.back().path.filename();  // the older one
  EXPECT_TRUE(contains(error_of([&] { train(); }), "does not belong to this run"));
  options_.resume = other;
  train();
  EXPECT_EQ(list_checkpoints(other).size(), 2U);
}

}  // namespace
}  // namespace tilemoe::train
