// The evaluation of times in tilemoe_kernels: quartiles, interleaved rounds, limits, the results
// file.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "clock.h"
#include "report.h"

namespace tilemoe::app {

// A GPU's specification; this test has no GPU.
std::unique_ptr<Clock> make_cuda_clock() {
  return nullptr;
}
std::string cuda_device_name() {
  return "Stand-in H100";
}
void add_cuda_versions(Values& versions) {
  versions["driver"] = "1.0";
}

namespace {

// The n-th body takes n ms.
class CountingClock final : public Clock {
 public:
  std::vector<StepTime> collect() override { return {{"body", ++calls}}; }
  double calls = 0;

 private:
  void begin(const char*) override {}
  void end(const char*) override {}
};

TEST(Quartiles, AreInterpolatedAsRecordsDoes) {
  const auto expect = [](Samples samples, double first, double median, double third) {
    const Quartiles q = quartiles(std::move(samples));
    EXPECT_DOUBLE_EQ(q.first, first);
    EXPECT_DOUBLE_EQ(q.median, median);
    EXPECT_DOUBLE_EQ(q.third, third);
  };
  expect({7}, 7, 7, 7);
  expect({4, 2}, 2.5, 3, 3.5);
  expect({5, 1, 4, 2, 3}, 2, 3, 4);
  expect({10, 1, 2, 40}, 1.75, 6, 17.5);
}

TEST(Rounds, AreInterleavedInBothDirectionsAfterAWarmUp) {
  CountingClock clock;
  std::string order;
  const std::vector<Samples> samples =
      interleaved_ms(clock, {[&] { order += 'a'; }, [&] { order += 'b'; }}, 2);
  EXPECT_EQ(order, "baabba");
  EXPECT_EQ(samples, (std::vector<Samples>{{3, 6}, {4, 5}}));
}

TEST(Steps, OfOneNameAreAddedUp) {
  const std::vector<StepTime> sums = summed({{"down", 1}, {"combine", 2}, {"down", 4}});
  ASSERT_EQ(sums.size(), 2u);
  EXPECT_EQ(sums[0].step, "down");
  EXPECT_EQ(sums[0].ms, 5);
  EXPECT_EQ(sums[1].ms, 2);
}

TEST(Limits, AreTheLargerOfOperationsAndBytes) {
  constexpr Limits limits{.flop_per_s = 798e12, .bytes_per_s = 3.0e12};
  EXPECT_DOUBLE_EQ(limits.ms({798e9, 1}), 1);
  EXPECT_DOUBLE_EQ(limits.ms({798e9, 6e9}), 2);
  EXPECT_EQ(Limits{}.ms({798e9, 6e9}), 0);
}

TEST(Report, IsALineForEachMeasurement) {
  const std::string file = testing::TempDir() + "kernel_report.jsonl";
  std::ofstream(file) << "before\n";
  Report report(Device::kCuda, {.flop_per_s = 798e12, .bytes_per_s = 3.0e12}, file);
  report.add_times("kernels/wide/up_projection", {2, 1, 3}, {{798e9, 3e9}}, {{"rows", 5}});
  report.add("gemm/bare/wgmma", {{"burst_mhz", 1234.5678}, {"name", "x"}});
  const auto read = [&] {
    std::vector<nlohmann::json> lines;
    std::ifstream stream(file);
    for (std::string line; std::getline(stream, line);)
      lines.push_back(nlohmann::json::parse(line, nullptr, false));
    return lines;
  };
  EXPECT_TRUE(read().at(0).is_discarded()) << "the file is written as a whole";
  report.write();
  const std::vector<nlohmann::json> lines = read();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].size(), 5u);
  EXPECT_EQ(lines[0]["name"], "kernels/wide/up_projection");
  EXPECT_EQ(lines[0]["device"], "Stand-in H100");
  EXPECT_EQ(lines[0]["versions"]["driver"], "1.0");
  EXPECT_EQ(lines[0]["values"], nlohmann::json::parse(R"({
    "ms": [1.5, 2.0, 2.5], "tflop_per_s": [319.2, 399.0, 532.0],
    "gb_per_s": [1200.0, 1500.0, 2000.0],
    "limit_ms": 1.0, "limit_over_ms": [0.4, 0.5, 0.66667], "limit_tflop_per_s": 798.0,
    "limit_gb_per_s": 3000.0, "rows": 5})"));
  EXPECT_EQ(lines[1]["values"]["burst_mhz"], 1234.6);
  std::remove(file.c_str());
}

TEST(Report, RefusesAFileThatItCannotWrite) {
  EXPECT_THROW(Report(Device::kCuda, {}, "/nowhere/out.jsonl"), std::runtime_error);
}

}  // namespace
}  // namespace tilemoe::app
