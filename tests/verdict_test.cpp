// The file that keeps what `tilemoe doctor --blackwell` found: what is read back, what gives none.
#include "cuda/verdict.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace tilemoe::cuda {
namespace {

namespace fs = std::filesystem;

VerdictKey b200() {
  return {.library = "0.2.0, sources 0123456789abcdef, nvcc 13.0.88",
          .driver = "580.95.05, CUDA 13.0",
          .gpu = "NVIDIA B200, compute capability 10.0, 148 multiprocessors",
          .kit = "sm100"};
}

Verdict agreed() {
  return {.key = b200(),
          .outcome = Outcome::kAgreed,
          .date = "2026-11-23",
          .what = "agreed with sm80 in 40 cases, 312 tensors, each 1000 times"};
}

class VerdictFile : public testing::Test {
 protected:
  VerdictFile() {
    std::string name = testing::TempDir() + "verdict-XXXXXX";
    folder_ = mkdtemp(name.data());
  }
  ~VerdictFile() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  std::string path() const { return verdict_file(folder_, b200()); }
  void put(const std::string& text) const { std::ofstream(path(), std::ios::binary) << text; }
  FoundVerdict find() const { return find_verdict(folder_, b200()); }
  void expect_none(const std::string& part) const {
    const FoundVerdict found = find();
    EXPECT_FALSE(found.verdict);
    EXPECT_FALSE(found.agreed());
    EXPECT_NE(found.words().find(part), std::string::npos) << found.words() << "\nlacks: " << part;
  }

  std::string folder_;
};

TEST_F(VerdictFile, IsReadBack) {
  for (Outcome outcome : {Outcome::kAgreed, Outcome::kDisagreed, Outcome::kHung, Outcome::kCrashed,
                          Outcome::kError}) {
    Verdict verdict = agreed();
    verdict.outcome = outcome;
    put(text_of(verdict));
    const FoundVerdict found = find();
    ASSERT_TRUE(found.verdict) << found.why_none;
    EXPECT_EQ(*found.verdict, verdict);
    EXPECT_EQ(found.agreed(), outcome == Outcome::kAgreed) << name_of(outcome);
  }
  put(text_of(agreed()));
  EXPECT_EQ(find().words(),
            "sm100 agreed with sm80 in 40 cases, 312 tensors, each 1000 times, on 2026-11-23 with "
            "driver 580.95.05, CUDA 13.0");
}

TEST_F(VerdictFile, ThatIsNotThereIsSaid) {
  expect_none(
      "`tilemoe doctor --blackwell` has not run on this GPU with this build and driver "
      "580.95.05, CUDA 13.0");
  folder_ += "/nowhere";
  expect_none("has not run on this GPU");
  folder_.clear();
  expect_none("neither HOME nor TILEMOE_STATE_DIR is set");
}

TEST_F(VerdictFile, CutOffAnywhereGivesNone) {
  const std::string whole = text_of(agreed());
  for (size_t bytes = 0; bytes < whole.size(); ++bytes)
    EXPECT_FALSE(parse_verdict(whole.substr(0, bytes)).verdict)
        << bytes << " of " << whole.size() << " bytes";
  for (const std::string& text : {std::string(), whole.substr(0, whole.size() / 2), whole + "x"}) {
    put(text);
    expect_none(path() + " is damaged: run `tilemoe doctor --blackwell` again");
  }
}

TEST(VerdictText, WithAnyByteChangedGivesNone) {
  const std::string whole = text_of(agreed());
  for (size_t i = 0; i < whole.size(); ++i)
    for (const int flip : {1, 2, 4, 32, 128}) {
      std::string text = whole;
      text[i] = static_cast<char>(text[i] ^ flip);
      EXPECT_FALSE(parse_verdict(text).verdict) << "byte " << i << ", " << flip;
    }
}

// Not even where its lines and its checksum would do.
TEST_F(VerdictFile, OfANewerVersionGivesNone) {
  std::string text = text_of(agreed());
  text.replace(text.find("verdict 1"), 9, "verdict 2");
  put(text);
  expect_none(path() + " was written by another version of TileMoE: run");
}

// A clock that is wrong makes no kernel wrong.
TEST_F(VerdictFile, OfALaterDateCounts) {
  Verdict verdict = agreed();
  verdict.date = "2999-01-01";
  put(text_of(verdict));
  EXPECT_TRUE(find().agreed());
}

TEST_F(VerdictFile, OfAnotherKeyGivesNone) {
  for (std::string VerdictKey::*part :
       {&VerdictKey::library, &VerdictKey::driver, &VerdictKey::gpu, &VerdictKey::kit}) {
    Verdict other = agreed();
    other.key.*part += "1";
    EXPECT_NE(verdict_file(folder_, other.key), path());
    std::ofstream(verdict_file(folder_, other.key)) << text_of(other);
    expect_none("has not run on this GPU");
    put(text_of(other));  // and under this key's name
    expect_none("is about another GPU, driver or library");
    fs::remove(path());
  }
}

TEST_F(VerdictFile, OfSeveralGpusLieBesideEachOther) {
  VerdictKey other = b200();
  other.gpu = "NVIDIA B300, compute capability 10.3, 160 multiprocessors";
  Verdict hung{.key = other, .outcome = Outcome::kHung, .date = "2026-11-24", .what = "hung"};
  put(text_of(agreed()));
  std::ofstream(verdict_file(folder_, other)) << text_of(hung);
  EXPECT_TRUE(find().agreed());
  EXPECT_EQ(find_verdict(folder_, other).verdict, hung);
}

TEST_F(VerdictFile, ThatCannotBeReadGivesNone) {
  fs::create_directory(path());
  expect_none("is no plain file");
  fs::remove(path());
  ASSERT_EQ(mkfifo(path().c_str(), 0600), 0);  // nobody writes to it: a reader could wait for ever
  expect_none("is no plain file");
  fs::remove(path());
  fs::create_symlink(path(), path());
  expect_none("cannot be read (");
  fs::remove(path());
  put(text_of(agreed()) + std::string(1 << 20, ' '));
  expect_none("is damaged");
  if (geteuid() == 0) return;  // root reads everything
  put(text_of(agreed()));
  fs::permissions(path(), fs::perms::none);
  expect_none("cannot be read (Permission denied)");
}

TEST_F(VerdictFile, HasOneLineAValue) {
  Verdict verdict = agreed();
  verdict.what = "stopped by an error: line 1\nkit sm80\r\n\toutcome agreed";
  put(text_of(verdict));
  ASSERT_TRUE(find().verdict);
  EXPECT_EQ(find().verdict->what, "stopped by an error: line 1 kit sm80   outcome agreed");
}

TEST(StateFolder, IsTheUsersOwn) {
  setenv("HOME", "/home/me", 1);
  unsetenv("XDG_STATE_HOME");
  unsetenv("TILEMOE_STATE_DIR");
  EXPECT_EQ(state_folder(), "/home/me/.local/state/tilemoe");
  setenv("XDG_STATE_HOME", "relative", 1);
  EXPECT_EQ(state_folder(), "/home/me/.local/state/tilemoe");
  setenv("XDG_STATE_HOME", "/state", 1);
  EXPECT_EQ(state_folder(), "/state/tilemoe");
  setenv("TILEMOE_STATE_DIR", "/mine", 1);
  EXPECT_EQ(state_folder(), "/mine");
  unsetenv("TILEMOE_STATE_DIR");
  unsetenv("XDG_STATE_HOME");
  setenv("HOME", "", 1);
  EXPECT_EQ(state_folder(), "");
}

TEST(DriverRelease, IsThatOfTheKernelModule) {
  EXPECT_EQ(driver_release("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 "
                           "19:39:15 UTC 2024\nGCC version:  gcc version 12.2.0\n"),
            "535.183.01");
  EXPECT_EQ(driver_release("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  "
                           "Release Build  (dvs-builder@U22)\n"),
            "580.95.05");
  EXPECT_EQ(driver_release("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159  Mon\n"),
            "580.159");
  EXPECT_EQ(driver_release(""), "");
  EXPECT_EQ(driver_release("GCC version:  gcc version 12.2.0 (Debian)\n"), "");
  EXPECT_EQ(driver_release("NVRM version: Kernel Module\nGCC version:  gcc version 12.2.0\n"), "");
}

}  // namespace
}  // namespace tilemoe::cuda
