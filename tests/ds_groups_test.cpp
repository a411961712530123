// The partial sums of ds: one for each 64 columns of A, whatever tiles the backend uses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "layer/workspace.h"
#include "verify/random.h"

namespace tilemoe {
namespace {

constexpr int64_t kRows = 3, kDepth = 16;  // of one expert, d

tilemoe_experts experts_of(int64_t n) {
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = TILEMOE_FLOAT32;
  experts.d = kDepth, experts.n = n, experts.E = 1;
  experts.activation = TILEMOE_IDENTITY;  // A is H
  return experts;
}

tilemoe_tensor matrix(std::vector<float>& values, int64_t rows, int64_t columns) {
  return {.data = values.data(),
          .dtype = TILEMOE_FLOAT32,
          .ndim = 2,
          .shape = {rows, columns},
          .stride = {columns, 1}};
}

// Small whole numbers, so that sums are exact in any order.
std::vector<float> whole_numbers(int64_t count, uint64_t seed) {
  verify::Random random(seed, 1);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.below(9)) - 4;
  return values;
}

class DsGroups : public testing::TestWithParam<int64_t> {};  // n

TEST_P(DsGroups, AreSumsOver64ColumnsEach) {
  const int64_t n = GetParam(), groups = (n + 63) / 64;
  ASSERT_EQ(ds_groups(n), groups);
  const tilemoe_experts experts = experts_of(n);
  std::vector<float> dO = whole_numbers(kRows * kDepth, 1), W2 = whole_numbers(kDepth * n, 2);
  std::vector<float> H = whole_numbers(kRows * n, 3), A_scaled(static_cast<size_t>(kRows * n));
  constexpr float kUntouched = -1e6f;
  std::vector<float> partial(static_cast<size_t>((groups + 1) * kRows), kUntouched);
  const int32_t offsets[] = {0, kRows};
  const Backend& backend = cpu_backend();
  const size_t bytes =
      backend.steps.activation_gradient.scratch_bytes(experts, {.capacity = kRows});
  std::vector<double> scratch(bytes / sizeof(double) + 1);
  tilemoe_tensor expert_W2 = matrix(W2, kDepth, n);
  expert_W2.ndim = 3;
  std::copy_backward(expert_W2.shape, expert_W2.shape + 2, expert_W2.shape + 3);
  std::copy_backward(expert_W2.stride, expert_W2.stride + 2, expert_W2.stride + 3);
  expert_W2.shape[0] = 1, expert_W2.stride[0] = kDepth * n;
  backend.steps.activation_gradient.run({.experts = &experts,
                                         .rows = {.E = 1, .capacity = kRows, .offsets = offsets},
                                         .dO = matrix(dO, kRows, kDepth),
                                         .W2 = expert_W2,
                                         .H = matrix(H, kRows, n),
                                         .dH = {},
                                         .A_scaled = matrix(A_scaled, kRows, n),
                                         .ds_partial = partial.data(),
                                         .scratch = {scratch.data(), bytes},
                                         .stream = nullptr});
  std::vector<float> expected(partial.size(), kUntouched);
  std::fill_n(expected.begin(), groups * kRows, 0.f);
  for (int64_t row = 0; row < kRows; ++row)
    for (int64_t column = 0; column < n; ++column)
      for (int64_t k = 0; k < kDepth; ++k)
        expected[static_cast<size_t>(column / 64 * kRows + row)] +=
            dO[static_cast<size_t>(row * kDepth + k)] * W2[static_cast<size_t>(k * n + column)] *
            H[static_cast<size_t>(row * n + column)];
  EXPECT_EQ(partial, expected);
}

INSTANTIATE_TEST_SUITE_P(, DsGroups, testing::Values(8, 64, 72, 256, 264, 520),
                         testing::PrintToStringParamName());

// The memory plan has a float for each row of the capacity and group.
TEST(DsGroupsOfALayer, HaveTheirPlaceInTheWorkspace) {
  tilemoe_routing_spec spec{};
  spec.kind = TILEMOE_ROUTING_GROUPED;
  spec.E = 1, spec.capacity = 1000;
  for (const int64_t n : {8, 64, 72, 1536}) {
    const BackwardPlan plan(cpu_backend(), experts_of(n), spec, {.gradients = TILEMOE_GRADIENT_S});
    const size_t bytes = static_cast<size_t>((n + 63) / 64) * 1000 * sizeof(float);
    EXPECT_EQ(plan.activation_scratch.place - plan.ds_partial, (bytes + 255) / 256 * 256);
  }
}

}  // namespace
}  // namespace tilemoe
