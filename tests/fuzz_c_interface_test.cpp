// The fuzzer with bytes of a fixed random sequence: the same calls on every run.
#include <gtest/gtest.h>

#include <random>

#include "fuzz_call.h"

namespace tilemoe::fuzz {
namespace {

class FuzzCInterface : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { ASSERT_EQ(tilemoe_set_num_threads(GetParam()), TILEMOE_SUCCESS); }
  void TearDown() override { tilemoe_set_num_threads(0); }
};

TEST_P(FuzzCInterface, KeepsItsPromises) {
  constexpr int kSeeds = 300;
  World world;
  std::vector<uint8_t> bytes(1024);
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 generator(seed);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
    try {
      fuzz(world, bytes.data(), bytes.size());
    } catch (const Finding& finding) {
      FAIL() << "seed " << seed << ": " << finding.what();
    }
  }
  // Both answers are common, or the fuzzer tries nothing.
  EXPECT_GT(world.statistics.succeeded, kSeeds * 3);
  EXPECT_GT(world.statistics.refused, kSeeds * 3);
  RecordProperty("succeeded", std::to_string(world.statistics.succeeded));
  RecordProperty("refused", std::to_string(world.statistics.refused));
}

INSTANTIATE_TEST_SUITE_P(Threads, FuzzCInterface, testing::Values(1, 2));

}  // namespace
}  // namespace tilemoe::fuzz
