// The fuzzer with bytes of a fixed random sequence: the same calls on every run. TILEMOE_FUZZ_SEEDS
// sets the number of sequences.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>

#include "fuzz_call.h"

namespace tilemoe::fuzz {
namespace {

class FuzzCInterface : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { ASSERT_EQ(tilemoe_set_num_threads(GetParam()), TILEMOE_SUCCESS); }
  void TearDown() override { tilemoe_set_num_threads(0); }
};

int number_of_seeds() {
  const char* const requested = std::getenv("TILEMOE_FUZZ_SEEDS");
  return requested ? std::stoi(requested) : 300;
}

TEST_P(FuzzCInterface, KeepsItsPromises) {
  const int seeds = number_of_seeds();
  World world;
  std::vector<uint8_t> bytes(1024);
  for (int seed = 0; seed < seeds; ++seed) {
    std::mt19937 generator(static_cast<unsigned>(seed));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
    try {
      fuzz(world, bytes.data(), bytes.size());
    } catch (const Finding& finding) {
      FAIL() << "seed " << seed << ": " << finding.what();
    }
  }
  // Both outcomes are common, or the fuzzer tests nothing.
  EXPECT_GT(world.statistics.succeeded, seeds * 3);
  EXPECT_GT(world.statistics.refused, seeds * 3);
  RecordProperty("succeeded", std::to_string(world.statistics.succeeded));
  RecordProperty("refused", std::to_string(world.statistics.refused));
}

INSTANTIATE_TEST_SUITE_P(, FuzzCInterface, testing::Values(1, 2),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace tilemoe::fuzz
