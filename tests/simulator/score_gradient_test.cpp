// The score gradient with biases on a simulated GPU: pairs of any tokens, also without a row, and
// without a token. All values are whole numbers, whose sums are exact in any order.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/kernels/kernels.h"
#include "run_kernels.h"
#include "simulator/setting.h"

namespace tilemoe::simulator_test {
namespace {

constexpr int64_t kD = 520, kN = 136, kE = 3;  // more than two chunks a lane, three sums a row

tilemoe_tensor matrix(void* data, int64_t rows, int64_t columns) {
  return {.data = data,
          .dtype = TILEMOE_BFLOAT16,
          .ndim = 2,
          .shape = {rows, columns},
          .stride = {columns, 1}};
}

struct Pair {
  int64_t token;  // -1: no row
  int64_t expert;
};

void expect_sums(int64_t T, const std::vector<Pair>& pairs) {
  std::mt19937 random(7);
  const auto whole = [&](size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 7) - 3);
    return values;
  };
  const auto count = static_cast<int64_t>(pairs.size());
  const std::vector<float> dO = whole(static_cast<size_t>(T * kD)), b2 = whole(kE * kD);
  const std::vector<float> partial = whole(static_cast<size_t>(ds_groups(kN) * count));
  std::vector<int32_t> offsets = {0}, row_token, pair_row(pairs.size(), -1);
  for (int64_t e = 0; e < kE; ++e) {
    for (size_t i = 0; i < pairs.size(); ++i)
      if (pairs[i].token >= 0 && pairs[i].expert == e) {
        pair_row[i] = static_cast<int32_t>(row_token.size());
        row_token.push_back(static_cast<int32_t>(pairs[i].token));
      }
    offsets.push_back(static_cast<int32_t>(row_token.size()));
  }
  std::vector<float> want(pairs.size());
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pair_row[i] < 0) continue;
    for (int64_t group = 0; group < ds_groups(kN); ++group)
      want[i] += partial[static_cast<size_t>(group * count + pair_row[i])];
    for (int64_t j = 0; j < kD; ++j)
      want[i] += dO[static_cast<size_t>(pairs[i].token * kD + j)] *
                 b2[static_cast<size_t>(pairs[i].expert * kD + j)];
  }

  const auto shortened = [](const std::vector<float>& values) {
    std::vector<uint16_t> bits;
    for (float value : values)
      bits.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    return bits;
  };
  const Array<uint16_t> dO_on_device(shortened(dO)), b2_on_device(shortened(b2));
  const Array<float> partial_on_device(partial), ds(std::vector<float>(pairs.size(), -99.0f));
  const Array<int32_t> offsets_on_device(offsets), tokens(row_token), rows(pair_row);
  tilemoe_experts experts{};
  experts.dtype = TILEMOE_BFLOAT16, experts.d = kD, experts.n = kN, experts.E = kE;
  tilemoe_routing routing{};
  routing.spec.kind = TILEMOE_ROUTING_GENERAL, routing.spec.T = T, routing.spec.E = kE;
  routing.spec.pairs = routing.spec.capacity = count;
  routing.offsets = offsets_on_device.data();
  routing.row_token = tokens.data(), routing.pair_row = rows.data();
  const Outcome outcome = run_with(1, [&] {
    cuda::score_gradient({.experts = &experts,
                          .routing = &routing,
                          .ds_partial = partial_on_device.data(),
                          .dO = matrix(dO_on_device.data(), T, kD),
                          .b2 = matrix(b2_on_device.data(), kE, kD),
                          .ds = ds.data(),
                          .stream = nullptr});
  });
  EXPECT_EQ(outcome.error, cudaSuccess);
  EXPECT_TRUE(outcome.findings.empty()) << all(outcome.findings);
  EXPECT_EQ(ds.read(), want);
}

class ScoreGradient : public testing::Test {
 protected:
  void SetUp() override { Machine::instance().set_device(simulator::setting_of("sm90").device); }
};

TEST_F(ScoreGradient, IsOfEveryPairsTokenAndExpert) {
  expect_sums(2, {{1, 2}});
  expect_sums(3, {{0, 0}, {0, 1}, {0, 2}, {0, 0}, {1, 1}, {1, 1}, {2, 0}, {1, 2}, {2, 1}});
}

TEST_F(ScoreGradient, IsZeroWithoutARow) {
  expect_sums(3, {{-1, 0}, {2, 1}, {-1, 1}, {2, 2}, {-1, 0}, {-1, 0}, {-1, 0}, {-1, 0}, {1, 1}});
}

TEST_F(ScoreGradient, ReadsNothingWithoutAToken) {
  expect_sums(0, std::vector<Pair>(9, {-1, 0}));
}

}  // namespace
}  // namespace tilemoe::simulator_test
