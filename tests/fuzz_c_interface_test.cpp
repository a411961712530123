// The fuzzer with bytes of a fixed random sequence: the same calls on every run. TILEMOE_FUZZ_SEEDS
// sets the number of sequences.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <tuple>

#include "fuzz_call.h"

namespace tilemoe::fuzz {
namespace {

// A number of threads and the first of every other seed: two halves, which can run at once.
class FuzzCInterface : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    ASSERT_EQ(tilemoe_set_num_threads(std::get<0>(GetParam())), TILEMOE_SUCCESS);
  }
  void TearDown() override { tilemoe_set_num_threads(0); }
};

int number_of_seeds() {
  const char* const requested = std::getenv("TILEMOE_FUZZ_SEEDS");
  return requested ? std::stoi(requested) : 300;
}

TEST_P(FuzzCInterface, KeepsItsPromises) {
  const int seeds = number_of_seeds();
  World world;
  int done = 0;
  std::vector<uint8_t> bytes(1024);
  for (int seed = std::get<1>(GetParam()); seed < seeds; seed += 2, ++done) {
    std::mt19937 generator(static_cast<unsigned>(seed));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(generator());
    try {
      fuzz(world, bytes.data(), bytes.size());
    } catch (const Finding& finding) {
      FAIL() << "seed " << seed << ": " << finding.what();
    }
  }
  // Both outcomes are common, or the fuzzer tests nothing.
  EXPECT_GT(world.statistics.succeeded, done * 3);
  EXPECT_GT(world.statistics.refused, done * 3);
  RecordProperty("succeeded", std::to_string(world.statistics.succeeded));
  RecordProperty("refused", std::to_string(world.statistics.refused));
}

INSTANTIATE_TEST_SUITE_P(, FuzzCInterface,
                         testing::Combine(testing::Values(1, 2), testing::Values(0, 1)),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) == 0 ? "_even_seeds" : "_odd_seeds");
                         });

}  // namespace
}  // namespace tilemoe::fuzz
