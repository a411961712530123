// `tilemoe doctor --blackwell` on a GPU that is made up: children that agree, disagree, hang, crash
// and fail, and the verdict that is left of each.
#include "trial.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

namespace tilemoe::app {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;
using cuda::Outcome;

const std::string kStep =
    R"(echo '{"step": "swiglu/bfloat16 by sm100, against float64", "done": 0.25}'; )";
const std::string kFinished =
    R"(echo '{"finished": {"cases": 40, "tensors": 312, "repeats": 1000}}'; )";
const std::string kAgrees = kStep + kFinished;

void wait_for(const fs::path& file) {
  for (int i = 0; i < 1000 && !fs::exists(file); ++i) std::this_thread::sleep_for(10ms);
  ASSERT_TRUE(fs::exists(file)) << file;
}

class TrialOfAKit : public testing::Test {
 protected:
  TrialOfAKit() {
    std::string name = testing::TempDir() + "trial-XXXXXX";
    folder_ = mkdtemp(name.data());
    // Where these tests run in the background, a shell has them ignored, here and in the children.
    for (const int signal : {SIGINT, SIGHUP, SIGQUIT}) std::signal(signal, SIG_DFL);
  }
  ~TrialOfAKit() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  static cuda::VerdictKey b200() {
    return {.library = "0.2.0", .driver = "580.95.05", .gpu = "NVIDIA B200", .kit = "sm100"};
  }
  // A child that does what the shell is told.
  Trial child(const std::string& script) const {
    return {.key = b200(),
            .folder = folder_ / "state",
            .command = {"/bin/sh", "-c", "cd '" + folder_.string() + "'; " + script},
            .most_silent = 30s};
  }
  std::string file() const { return cuda::verdict_file(folder_ / "state", b200()); }
  cuda::FoundVerdict kept(const cuda::VerdictKey& key = b200()) const {
    return cuda::find_verdict(folder_ / "state", key);
  }
  // Nothing is beside the verdict but the lock.
  int files_left() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_ / "state"), {}));
  }

  void expect_kept(const Trial& trial, Outcome outcome, const std::string& what) const {
    const TrialReport report = try_kit(trial);
    EXPECT_EQ(report.verdict.outcome, outcome) << report.verdict.what;
    EXPECT_EQ(report.verdict.what, what);
    EXPECT_EQ(report.agreed(), outcome == Outcome::kAgreed);
    EXPECT_EQ(kept().verdict, report.verdict);
    EXPECT_EQ(kept().agreed(), outcome == Outcome::kAgreed);
    EXPECT_EQ(files_left(), 2);
  }
  // After an earlier agreement.
  void expect_no_verdict(const Trial& trial, const std::string& part) const {
    try_kit(child(kAgrees));
    ASSERT_TRUE(kept().agreed());
    expect_refusal(trial, part);
    EXPECT_FALSE(kept().verdict);
    EXPECT_EQ(files_left(), 1);
  }
  static void expect_refusal(const Trial& trial, const std::string& part) {
    try {
      try_kit(trial);
      ADD_FAILURE() << "a verdict, where there is to be: " << part;
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }

  // What the child wrote to the file `child`, once it is there.
  pid_t pid_of_the_child() const {
    wait_for(folder_ / "child");
    pid_t pid = 0;
    std::ifstream(folder_ / "child") >> pid;
    return pid;
  }
  static void expect_gone(pid_t pid) {
    ASSERT_GT(pid, 0);
    for (int i = 0; i < 1000 && kill(pid, 0) == 0; ++i) std::this_thread::sleep_for(10ms);
    EXPECT_NE(kill(pid, 0), 0) << "process " << pid << " is still there";
  }

  fs::path folder_;
};

const std::string kLeavesItsPid = "echo $$ >pid && mv pid child; ";

TEST_F(TrialOfAKit, ThatAgreesIsKept) {
  Trial trial = child(kAgrees);
  std::string steps;
  trial.on_step = [&](const std::string& step, double done) {
    steps += step + " " + std::to_string(done) + "\n";
  };
  expect_kept(trial, Outcome::kAgreed,
              "agreed with sm80 in 40 cases, 312 tensors, each 1000 times");
  EXPECT_EQ(steps, "swiglu/bfloat16 by sm100, against float64 0.250000\n");
  EXPECT_EQ(kept().verdict->key, b200());
  const TrialReport report = try_kit(child(kAgrees));
  EXPECT_NE(report.text().find("verdict   sm100 agreed with sm80"), std::string::npos);
  EXPECT_NE(report.text().find("kept in   " + file() + "\n"), std::string::npos);
  EXPECT_EQ(report.json().at("outcome"), "agreed");
}

TEST_F(TrialOfAKit, ThatDisagreesNamesTheFirstTensors) {
  std::string script = kStep;
  for (const char* output : {"O", "dX", "dW1", "dW2", "ds"})
    script += std::string(R"(echo '{"disagreed": "swiglu/bfloat16, )") + output + R"("}'; )";
  expect_kept(child(script + kFinished), Outcome::kDisagreed,
              "disagreed: swiglu/bfloat16, O; swiglu/bfloat16, dX; swiglu/bfloat16, dW1; and 2 "
              "more");
  const TrialReport report = try_kit(child(script + kFinished));
  EXPECT_EQ(report.disagreements.size(), 5u);
  EXPECT_EQ(report.json().at("disagreements").at(4), "swiglu/bfloat16, ds");
}

TEST_F(TrialOfAKit, ThatHangsIsKilledWithWhatItStarted) {
  Trial trial = child("sleep 1000 & echo $! >pid && mv pid child; " + kStep + "sleep 1000");
  trial.most_silent = 500ms;
  const auto start = std::chrono::steady_clock::now();
  expect_kept(trial, Outcome::kHung,
              "hung after 0.5 s in swiglu/bfloat16 by sm100, against float64");
  EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
  expect_gone(pid_of_the_child());
}

// Neither what is no event nor the end of its output keeps a child alive, nor an agreement.
TEST_F(TrialOfAKit, ThatOnlyMakesNoiseHangs) {
  for (const std::string noise :
       {"while :; do echo noise; echo '{}'; echo '{\"step\": 3}'; echo 7; sleep 0.05; done",
        "while :; do printf x; sleep 0.05; done", "exec >/dev/null; sleep 1000"}) {
    Trial trial = child(kAgrees + noise);
    trial.most_silent = 500ms;
    expect_kept(trial, Outcome::kHung,
                "hung after 0.5 s in swiglu/bfloat16 by sm100, against float64");
  }
}

TEST_F(TrialOfAKit, ThatIsSlowDoesNotHang) {
  std::string script;
  for (int i = 0; i < 8; ++i) script += kStep + "sleep 0.5; ";
  Trial trial = child(script + kFinished);
  trial.most_silent = 3s;
  expect_kept(trial, Outcome::kAgreed,
              "agreed with sm80 in 40 cases, 312 tensors, each 1000 times");
}

TEST_F(TrialOfAKit, ThatCrashesIsKept) {
  const std::string place = " in swiglu/bfloat16 by sm100, against float64";
  expect_kept(child(kStep + "kill -SEGV $$"), Outcome::kCrashed,
              "crashed by signal 11 (Segmentation fault)" + place);
  expect_kept(child(kStep + "kill -ABRT $$"), Outcome::kCrashed,
              "crashed by signal 6 (Aborted)" + place);
  expect_kept(child(kStep + "kill -KILL $$"), Outcome::kCrashed,
              "crashed by signal 9 (Killed)" + place);
  expect_kept(child("kill -BUS $$"), Outcome::kCrashed, "crashed by signal 7 (Bus error)");
  // Even after it has said that all is well.
  expect_kept(child(kAgrees + "kill -SEGV $$"), Outcome::kCrashed,
              "crashed by signal 11 (Segmentation fault)" + place);
  expect_kept(child(kStep + R"(echo '{"disagreed": "O"}'; kill -SEGV $$)"), Outcome::kCrashed,
              "crashed by signal 11 (Segmentation fault)" + place + ", after: O");
}

TEST_F(TrialOfAKit, ThatFailsIsKept) {
  const std::string place =
      "was stopped by an error in swiglu/bfloat16 by sm100, against float64: ";
  expect_kept(child(kStep + R"(echo '{"error": "cudaErrorIllegalAddress"}')"), Outcome::kError,
              place + "cudaErrorIllegalAddress");
  expect_kept(child(kStep + "exit 3"), Outcome::kError,
              place + "the comparison ended with status 3");
  expect_kept(child(kAgrees + "exit 1"), Outcome::kError,
              place + "the comparison ended with status 1");
  expect_kept(child(kStep), Outcome::kError, place + "the comparison ended without a result");
  // What compared nothing is no agreement, nor is a line that was cut off.
  for (const char* finished : {R"({"cases": 0, "tensors": 312, "repeats": 1000})",
                               R"({"cases": 40, "tensors": 0, "repeats": 1000})",
                               R"({"cases": 40, "tensors": 312, "repeats": 0})"})
    expect_kept(child(kStep + "echo '{\"finished\": " + finished + "}'"), Outcome::kError,
                place + "the comparison ended without a result");
  expect_kept(child(kStep + R"(printf '{"finished": {"cases": 40, "tensors": 312, "rep')"),
              Outcome::kError, place + "the comparison ended without a result");
}

TEST_F(TrialOfAKit, LeavesNoVerdictWhereThereIsNone) {
  expect_no_verdict(child(R"(echo '{"refused": "this build has no sm100 kit"}'; exit 1)"),
                    "this build has no sm100 kit");
  expect_no_verdict(child(kStep + "kill -TERM $$"), "was ended by signal 15 (Terminated)");
  expect_no_verdict(child(kStep + "kill -INT $$"), "was ended by signal 2 (Interrupt)");
  Trial absent = child("");
  absent.command = {"/nowhere/tilemoe"};
  expect_no_verdict(absent, "cannot start /nowhere/tilemoe");
}

// Whatever ends the command: its child goes too, and the earlier verdict had gone before.
TEST_F(TrialOfAKit, ThatIsCutOffLeavesNoVerdictAndNoChild) {
  for (const int signal : {SIGKILL, SIGINT, SIGTERM}) {
    try_kit(child(kAgrees));
    ASSERT_TRUE(kept().agreed());
    fs::remove(folder_ / "child");
    const pid_t command = fork();
    ASSERT_GE(command, 0);
    if (command == 0) {
      try_kit(child(kStep + kLeavesItsPid + "exec sleep 1000"));
      _exit(0);
    }
    const pid_t comparing = pid_of_the_child();
    EXPECT_FALSE(kept().verdict);
    kill(command, signal);
    int status = 0;
    ASSERT_EQ(waitpid(command, &status, 0), command);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == signal);
    expect_gone(comparing);
    EXPECT_FALSE(kept().verdict);
    EXPECT_EQ(files_left(), 1) << "the lock, which nobody holds";
  }
  // A trial that was killed while it wrote.
  std::ofstream(file() + ".unfinished") << "tilemoe verd";
  expect_kept(child(kAgrees), Outcome::kAgreed,
              "agreed with sm80 in 40 cases, 312 tensors, each 1000 times");
}

TEST_F(TrialOfAKit, DoesNotCountTheTimeInWhichItWasStopped) {
  const pid_t command = fork();
  ASSERT_GE(command, 0);
  if (command == 0) {
    Trial trial = child(kStep + kLeavesItsPid + "sleep 5; " + kFinished);
    trial.most_silent = 3500ms;
    try_kit(trial);
    _exit(0);
  }
  pid_of_the_child();
  kill(command, SIGSTOP);
  std::this_thread::sleep_for(4500ms);
  kill(command, SIGCONT);
  int status = 0;
  ASSERT_EQ(waitpid(command, &status, 0), command);
  EXPECT_TRUE(kept().agreed()) << kept().words();
}

TEST_F(TrialOfAKit, OfTwoAtOnceTheSecondGivesWay) {
  std::thread first([&] {
    try_kit(child(kStep + kLeavesItsPid + "while ! test -e go; do sleep 0.05; done; " + kFinished));
  });
  pid_of_the_child();
  expect_refusal(child("kill -SEGV $$"), "another `tilemoe doctor --blackwell` is at work");
  // Another kind of GPU is nobody else's business.
  Trial other = child(kAgrees);
  other.key.gpu = "NVIDIA B300";
  EXPECT_TRUE(try_kit(other).agreed());
  std::ofstream(folder_ / "go") << "\n";
  first.join();
  EXPECT_TRUE(kept().agreed()) << kept().words();
  EXPECT_TRUE(kept(other.key).agreed());
}

TEST_F(TrialOfAKit, LeavesTheVerdictsOnOtherKeys) {
  std::vector<cuda::VerdictKey> others;
  for (std::string cuda::VerdictKey::*part :
       {&cuda::VerdictKey::library, &cuda::VerdictKey::driver, &cuda::VerdictKey::gpu}) {
    Trial trial = child(kAgrees);
    trial.key.*part += " of another kind";
    others.push_back(trial.key);
    EXPECT_TRUE(try_kit(trial).agreed());
    EXPECT_FALSE(kept().verdict) << "that is about another";
  }
  EXPECT_FALSE(try_kit(child("kill -SEGV $$")).agreed());
  for (const cuda::VerdictKey& other : others) EXPECT_TRUE(kept(other).agreed());
}

TEST_F(TrialOfAKit, NeedsAFolderBeforeItBegins) {
  const std::string begins = "touch begun; " + kAgrees;
  Trial trial = child(begins);
  trial.folder = "/proc/tilemoe";  // which not even root can make
  expect_refusal(trial, "cannot make the folder /proc/tilemoe: ");
  trial.folder = "/proc/self";
  expect_refusal(trial, "cannot write /proc/self/sm100-");
  std::ofstream(folder_ / "file") << "\n";
  trial.folder = folder_ / "file";
  expect_refusal(trial, "TILEMOE_STATE_DIR names another");
  trial.folder.clear();
  expect_refusal(trial, "neither HOME nor TILEMOE_STATE_DIR is set");
  if (geteuid() != 0) {
    fs::create_directory(folder_ / "locked");
    fs::permissions(folder_ / "locked", fs::perms::owner_read | fs::perms::owner_exec);
    trial.folder = folder_ / "locked";
    expect_refusal(trial, "Permission denied");
  }
  EXPECT_FALSE(fs::exists(folder_ / "begun"));
}

}  // namespace
}  // namespace tilemoe::app
