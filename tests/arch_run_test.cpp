// Two archs compared by `tilemoe check --against`, with invented archs: the CPU backend computes,
// and the memory spoils the results of one of them.
#include "arch_run.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "child.h"
#include "verify/registry.h"

namespace tilemoe::app {
namespace {

using namespace std::chrono_literals;

// The host's memory; a read changes one bit if `on_read` returns true.
class SpoilingMemory final : public verify::Memory {
 public:
  Device device() const override { return host_.device(); }
  void* allocate(size_t bytes) override { return host_.allocate(bytes); }
  void release(void* memory) override { host_.release(memory); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    host_.copy_in(to, from_host, bytes);
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    host_.copy_out(to_host, from, bytes);
    if (bytes > 0 && on_read()) static_cast<unsigned char*>(to_host)[bytes / 2] ^= 1;
  }
  std::unique_ptr<verify::OtherWork> do_other_work() override { return host_.do_other_work(); }

  std::function<bool()> on_read = [] { return false; };  // whether to spoil it

 private:
  verify::Memory& host_ = verify::host_memory();
};

const std::string kFirst = "one-token/bfloat16", kSecond = "every-expert/float16";

class ArchRuns : public testing::Test {
 protected:
  // In the child `arch_` is the arch.
  ArchRun run(const std::string& arch, int64_t repeats = 0) {
    return run_arch({.arch = arch,
                     .cases = {*verify::find_case(kFirst), *verify::find_case(kSecond)},
                     .repeats = repeats,
                     .max_silence = max_silence_,
                     .select =
                         [&](const std::string& name) {
                           arch_ = name;
                           return on_select_();
                         },
                     .memory = [&]() -> verify::Memory& { return memory_; },
                     .on_case = [&](size_t i) { begun_.push_back(i); }});
  }
  void expect_failure(const std::string& part, bool every_case = false) {
    const ArchRun failed = run("sm90");
    ASSERT_FALSE(failed.failures.empty());
    EXPECT_NE(failed.failures[0].find(part), std::string::npos) << failed.failures[0];
    EXPECT_EQ(failed.cases, every_case ? 2u : 0u);
    EXPECT_NE(failed.text().find(" failures\n  " + failed.failures[0]), std::string::npos);
    EXPECT_EQ(failed.json().at("failures").at(0), failed.failures[0]);
  }

  SpoilingMemory memory_;
  std::string arch_;
  std::vector<size_t> begun_;
  std::chrono::milliseconds max_silence_ = 60s;
  std::function<std::string()> on_select_ = [] { return ""; };
};

TEST_F(ArchRuns, OfEqualBitsHaveNoDifferences) {
  const ArchRun one = run("sm90", 3), other = run("sm80");
  EXPECT_EQ(begun_, (std::vector<size_t>{0, 1, 0, 1}));
  for (const ArchRun* all : {&one, &other}) {
    EXPECT_EQ(all->cases, 2u);
    EXPECT_EQ(all->failures, std::vector<std::string>());
    EXPECT_GE(all->bits.size(), 2u * 2 * 5);
    EXPECT_EQ(all->bits.size(), static_cast<size_t>(all->tensors));
    EXPECT_EQ(all->text(),
              all->arch + ": 2 cases, " + std::to_string(all->tensors) + " tensors, 0 failures\n");
  }
  EXPECT_EQ(one.device, tilemoe_device_description(TILEMOE_CPU));
  EXPECT_EQ(tensors_compared(one, other), one.bits.size());
  EXPECT_EQ(differences(one, other), std::vector<std::string>());
  EXPECT_EQ(arch_, "") << "nothing happens in this process";
}

// One bit is within every bound of float64, but not equal.
TEST_F(ArchRuns, OfOtherBitsHaveALineForEachCase) {
  memory_.on_read = [&] { return arch_ == "sm90"; };
  const std::vector<std::string> lines = differences(run("sm90"), run("sm80"));
  ASSERT_EQ(lines.size(), 4u) << "two cases, of both forms";
  EXPECT_EQ(lines[0].rfind(kFirst + ": H, O, ", 0), 0u) << lines[0];
  EXPECT_NE(lines[0].find(" by sm90 have other bits than by sm80"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[1].rfind(kFirst + " (integers): ", 0), 0u) << lines[1];
  EXPECT_EQ(lines[2].rfind(kSecond + ": ", 0), 0u) << lines[2];
  EXPECT_FALSE(run("sm90").failures.empty()) << "whole numbers are exact";
}

// A case that one of them did not run is a failure there, and no difference.
TEST_F(ArchRuns, CompareWhatBothRan) {
  ArchRun one = run("sm90");
  const ArchRun other = run("sm80");
  std::erase_if(one.bits, [](const auto& tensor) { return tensor.of_case != kFirst; });
  EXPECT_EQ(tensors_compared(one, other), one.bits.size());
  EXPECT_EQ(differences(one, other), std::vector<std::string>());
  one.bits.clear();
  EXPECT_EQ(tensors_compared(one, other), 0u);
}

TEST_F(ArchRuns, AreRepeated) {
  int64_t reads = 0;
  memory_.on_read = [&] { return ++reads > 300; };
  const ArchRun repeated = run("sm90", 100);
  ASSERT_FALSE(repeated.failures.empty());
  EXPECT_NE(repeated.failures[0].find("has other bits than run 0"), std::string::npos)
      << repeated.failures[0];
}

TEST_F(ArchRuns, ThatCannotBeAreSkipped) {
  on_select_ = [] { return "this build has no arch sm90"; };
  EXPECT_EQ(run("sm90").text(), "sm90: not run: this build has no arch sm90\n");
  on_select_ = []() -> std::string { throw std::runtime_error("no such GPU"); };
  const ArchRun skipped = run("sm90");
  EXPECT_EQ(skipped.skipped, "no such GPU");
  EXPECT_EQ(skipped.json(), nlohmann::json({{"arch", "sm90"}, {"skipped", "no such GPU"}}));
  EXPECT_TRUE(skipped.failures.empty() && skipped.bits.empty() && begun_.empty());
}

TEST_F(ArchRuns, ThatFailNameTheCase) {
  const std::string rest = "; 1 later cases were not run";
  memory_.on_read = []() -> bool { throw std::runtime_error("cudaErrorIllegalAddress"); };
  expect_failure(kFirst + ": cudaErrorIllegalAddress" + rest);
  memory_.on_read = []() -> bool { std::raise(SIGSEGV), std::abort(); };
  expect_failure(kFirst + ": crashed by signal 11 (Segmentation fault)" + rest);
  memory_.on_read = []() -> bool { _exit(3); };
  expect_failure(kFirst + ": ended with status 3" + rest);
  memory_.on_read = []() -> bool { _exit(0); };  // before its end
  expect_failure(kFirst + ": ended with status 0" + rest);
  max_silence_ = 1s;
  memory_.on_read = []() -> bool {
    std::this_thread::sleep_for(1000s);
    return false;
  };
  const auto start = std::chrono::steady_clock::now();
  expect_failure(kFirst + ": hung for 1 s" + rest);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 30s);
}

TEST(Child, IsKilledIfItIsSilent) {
  const auto nothing = [](const std::string&) {};
  std::string emitted;
  pid_t child = 0;
  const ChildEnd hung = run_child(
      500ms,
      [](const Emit& emit) {
        emit(std::to_string(getpid()));
        std::this_thread::sleep_for(1000s);
      },
      [&](const std::string& line) { child = std::stoi(line); });
  EXPECT_TRUE(hung.hung);
  EXPECT_EQ(hung.signal, SIGKILL);
  EXPECT_EQ(kill(child, 0), -1) << "it is gone";
  // A slow child that emits lines is not killed.
  const ChildEnd slow = run_child(
      2s,
      [](const Emit& emit) {
        for (int i = 0; i < 6; ++i) {
          std::this_thread::sleep_for(500ms);
          emit("one line\nand another");
        }
      },
      [&](const std::string& line) { emitted += line + ";"; });
  EXPECT_EQ(slow.words(), "ended with status 0");
  EXPECT_EQ(emitted.substr(0, 21), "one line;and another;");
  EXPECT_EQ(run_child(
                1s, [](const Emit&) { throw std::runtime_error("x"); }, nothing)
                .status,
            1);
}

TEST(Child, EndsWithItsParent) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t parent = fork();
  ASSERT_GE(parent, 0);
  if (parent == 0) {
    run_child(
        100s,
        [&](const Emit&) {
          const pid_t self = getpid();
          if (write(ends[1], &self, sizeof self) != sizeof self) _exit(1);
          std::this_thread::sleep_for(1000s);
        },
        [](const std::string&) {});
    _exit(0);
  }
  pid_t child = 0;
  ASSERT_EQ(read(ends[0], &child, sizeof child), static_cast<ssize_t>(sizeof child));
  kill(parent, SIGKILL);
  ASSERT_EQ(waitpid(parent, nullptr, 0), parent);
  close(ends[1]);
  EXPECT_EQ(read(ends[0], &child, sizeof child), 0) << "the child has closed its end";
}

}  // namespace
}  // namespace tilemoe::app
