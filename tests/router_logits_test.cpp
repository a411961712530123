// router_logits on the CPU.
#include "router_logits_support.h"

namespace tilemoe::test {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

TEST(RouterLogits, AreExactOnWholeNumbers) {
  verify::Memory& memory = verify::host_memory();
  for (const int64_t T : {0, 1, 17, 300})
    for (const int64_t d : {8, 72, 1032}) {
      expect_whole_logits(memory,
                          {.T = T, .E = 13, .d = d, .x = kF32, .weight = kF32, .biased = true});
      expect_whole_logits(memory, {.T = T,
                                   .E = 72,
                                   .d = d,
                                   .x = kF16,
                                   .weight = kF16,
                                   .logits = kF16,
                                   .biased = true,
                                   .padded = true});
    }
  expect_whole_logits(memory, {.T = 129, .E = 600, .d = 264, .logits = kBF16, .biased = true});
  expect_whole_logits(memory, {.T = 300, .E = 1, .d = 264, .x = kF32, .weight = kF32});
  expect_whole_logits(memory, {.T = 40, .E = 130, .d = 72, .weight = kF32, .padded = true});
}

TEST(RouterLogits, HaveAllBitsOfAFloat32Weight) {
  for (const DType x : {kF32, kBF16, kF16})
    expect_whole_weights(verify::host_memory(),
                         {.T = 50, .E = 20, .d = 264, .x = x, .weight = kF32});
}

TEST(RouterLogits, DependOnNoOtherToken) {
  verify::Memory& memory = verify::host_memory();
  const std::vector<int64_t> sizes = {1, 2, 3, 7, 16, 64, 257, 1000};
  for (const int64_t E : {1, 8, 70, 520})
    for (const DType x : {kF32, kBF16})
      expect_same_bits(memory, {.T = 1100, .E = E, .d = 328, .x = x, .weight = x}, sizes);
  expect_same_bits(memory, {.T = 1100, .E = 70, .d = 2184, .weight = kF32, .biased = true}, sizes);
}

}  // namespace
}  // namespace tilemoe::test
