// The report of `tilemoe doctor` from made-up results: what it says, how long it is, what passes.
#include "doctor_report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

namespace tilemoe::app {
namespace {

DoctorTimes times(const std::string& layer) {
  return {.layer = layer,
          .T = 8192,
          .d = 2048,
          .n = 3072,
          .E = 8,
          .K = 2,
          .forward = 2,
          .backward = 4.125,
          .dense = 4.9};
}

DoctorKit good_kit(const std::string& name) {
  return {.kit = name,
          .skipped = {},
          .cases = 40,
          .tensors = 312,
          .seconds = 11.6,
          .failures = {},
          .times = {times("7b-n256"), times("wide"), times("few-rows")}};
}

DoctorKit absent_kit(const std::string& name) {
  return {.kit = name, .skipped = "it needs 9.0", .failures = {}, .times = {}};
}

DoctorReport report(std::vector<DoctorKit> kits) {
  return {.version = "0.2.0",
          .commit = "0123abcd",
          .build = "Release, GNU 12.2.0",
          .gpu = {.name = "Some GPU",
                  .capability = "8.9",
                  .multiprocessors = 128,
                  .shared_bytes = 99 << 10,
                  .total_bytes = size_t{24} << 30,
                  .free_bytes = size_t{23} << 30,
                  .driver = "580.95.05",
                  .driver_cuda = "13.1",
                  .runtime = "13.0"},
          .kit = "sm80, the newest for compute capability 8.9",
          .kits = std::move(kits)};
}

void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(DoctorReport, SaysWhatRanWhere) {
  const DoctorReport good = report({good_kit("sm80"), absent_kit("sm90")});
  EXPECT_TRUE(good.passed());
  const std::string text = good.text();
  expect_parts(text, {"TileMoE   0.2.0, commit 0123abcd, Release, GNU 12.2.0",
                      "Some GPU, compute capability 8.9, 128 multiprocessors, 99.0 KiB of shared",
                      "memory    24.0 GiB, 23.0 GiB free",
                      "driver    580.95.05, CUDA 13.1; the library's runtime 13.0",
                      "kit       sm80, the newest for compute capability 8.9",
                      "sm80: 40 cases, 312 tensors, 0 failures, 12 s",
                      "sm90: not run: it needs 9.0", "verdict   passed: sm80\n"});
  const std::vector<std::string> lines = lines_of(text);
  EXPECT_LE(lines.size(), 30u) << text;
  for (const std::string& line : lines) EXPECT_LE(line.size(), 120u) << line;
  // dense / (forward + backward)
  const auto row = std::find_if(lines.begin(), lines.end(),
                                [](const auto& line) { return line.starts_with("wide "); });
  ASSERT_NE(row, lines.end()) << text;
  std::istringstream cells(*row);
  std::vector<std::string> words{std::istream_iterator<std::string>(cells), {}};
  EXPECT_EQ(words, (std::vector<std::string>{"wide", "sm80", "8192", "2048", "3072", "8", "2",
                                             "2.000", "4.125", "4.900", "0.80"}));
}

TEST(DoctorReport, ShowsTheFirstFailuresOfMany) {
  DoctorKit bad = good_kit("sm80");
  for (int i = 0; i < 20; ++i) bad.failures.push_back("case " + std::to_string(i) + " is wrong");
  bad.times.clear();
  const DoctorReport all = report({bad, good_kit("sm90")});
  EXPECT_FALSE(all.passed());
  expect_parts(all.text(), {"20 failures", "  case 0 is wrong\n", "  case 4 is wrong\n",
                            "  and 15 more\n", "verdict   FAILED: sm80; passed: sm90\n"});
  EXPECT_EQ(all.text().find("case 5 "), std::string::npos);
  EXPECT_LE(lines_of(all.text()).size(), 30u);
  EXPECT_EQ(all.json().at("kits").at(0).at("failures").size(), 20u) << "the file has all";
}

TEST(DoctorReport, ALayerThatDoesNotFitIsNoFailure) {
  DoctorKit kit = good_kit("sm80");
  kit.times[0].fewer_tokens = true;
  kit.times[1].skipped = "it needs 6.1 GiB of memory, 3.9 GiB are free";
  const DoctorReport fits = report({kit});
  EXPECT_TRUE(fits.passed());
  expect_parts(fits.text(), {"8192 (fewer)", "wide, sm80: not timed: it needs 6.1 GiB"});
  kit.times[2].failed = "cudaErrorLaunchFailure";
  const DoctorReport broken = report({kit});
  EXPECT_FALSE(broken.passed());
  expect_parts(broken.text(), {"few-rows, sm80: FAILED: cudaErrorLaunchFailure", "FAILED: sm80\n"});
}

// A report that compared nothing does not pass.
TEST(DoctorReport, NothingIsNoSuccess) {
  EXPECT_FALSE(report({}).passed());
  EXPECT_FALSE(report({absent_kit("sm80"), absent_kit("sm90")}).passed());
  EXPECT_EQ(report({absent_kit("sm80")}).verdict(), "FAILED: no kit runs here");
  DoctorKit empty = good_kit("sm80");
  empty.cases = 0;
  EXPECT_FALSE(report({empty}).passed());
  EXPECT_EQ(report({empty}).verdict(), "FAILED: nothing was compared");
}

TEST(DoctorReport, JsonHasTheNumbers) {
  const nlohmann::json all = report({good_kit("sm80"), absent_kit("sm90")}).json();
  EXPECT_EQ(all.at("passed"), true);
  EXPECT_EQ(all.at("gpu").at("free_bytes"), size_t{23} << 30);
  const nlohmann::json& sm80 = all.at("kits").at(0);
  EXPECT_EQ(sm80.at("tensors"), 312);
  EXPECT_EQ(sm80.at("times").at(1).at("bwd_ms"), 4.125);
  EXPECT_EQ(sm80.at("times").at(1).at("shape").at("n"), 3072);
  EXPECT_EQ(all.at("kits").at(1), nlohmann::json({{"kit", "sm90"}, {"skipped", "it needs 9.0"}}));
}

}  // namespace
}  // namespace tilemoe::app
