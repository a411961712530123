// The kernels of router_logits on a simulated GPU, in both forms and all tiles.
#include "router_logits_support.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"

namespace tilemoe::test {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

// Of few SMs, so that one CTA computes all chunks of a few tiles: by mma.sync, and on sm90 by wgmma.
class SimulatedLogits : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { machine().set_device(simulator::setting_of(GetParam()).device); }
  void TearDown() override {
    for (const simulator::Finding& finding : machine().take_findings())
      ADD_FAILURE() << simulator::describe(finding);
  }
  static simulator::Machine& machine() { return simulator::Machine::instance(); }
};

TEST_P(SimulatedLogits, AreExactOnWholeNumbers) {
  verify::Memory& memory = verify::cuda_memory();
  for (const int64_t T : {1, 17, 200})
    for (const int64_t d : {8, 72, 512, 584})
      expect_whole_logits(memory, {.T = T, .E = 13, .d = d});
  for (const int64_t T : {9, 300})
    for (const int64_t d : {72, 576})
      expect_whole_logits(memory, {.T = T,
                                   .E = 72,
                                   .d = d,
                                   .x = kF16,
                                   .weight = kF16,
                                   .logits = kF16,
                                   .biased = true,
                                   .padded = true});
  expect_whole_logits(memory, {.T = 3, .E = 9, .d = 1096});
  expect_whole_logits(memory, {.T = 400, .E = 200, .d = 528, .logits = kBF16, .biased = true});
  for (const int64_t T : {270, 600})  // on sm90 in pairs of tiles, the last of them empty
    for (const int64_t E : {100, 200, 330})
      expect_whole_logits(memory, {.T = T,
                                   .E = E,
                                   .d = 584,
                                   .x = kF16,
                                   .weight = kF16,
                                   .logits = kF16,
                                   .biased = true,
                                   .padded = true});
  // On sm90 a CTA has two tiles of the same tokens, or one without a second.
  for (const int64_t d : {72, 584, 1608})
    expect_whole_logits(memory,
                        {.T = 250, .E = 330, .d = d, .x = kF16, .weight = kF16, .biased = true});
  expect_whole_logits(memory, {.T = 500, .E = 250, .d = 1096, .weight = kF32, .padded = true});
  // Rows of logits by 16 bytes, in pairs of CTAs and, if rows are whole lines, alone.
  for (const int64_t T : {280, 500})
    for (const int64_t d : {584, 1088})
      expect_whole_logits(memory,
                          {.T = T, .E = 328, .d = d, .x = kF16, .weight = kF16, .logits = kF16});
  expect_whole_logits(memory, {.T = 500, .E = 200, .d = 1096, .logits = kBF16});
  expect_whole_logits(memory, {.T = 300, .E = 330, .d = 72, .weight = kF32});
  expect_whole_logits(memory, {.T = 600, .E = 1, .d = 520});
  expect_whole_logits(memory, {.T = 40, .E = 130, .d = 536, .weight = kF32, .padded = true});
  expect_whole_logits(memory, {.T = 500, .E = 33, .d = 72, .weight = kF32});
}

TEST_P(SimulatedLogits, HaveAllBitsOfAFloat32Weight) {
  expect_whole_weights(verify::cuda_memory(), {.T = 3, .E = 20, .d = 600, .weight = kF32});
  expect_whole_weights(verify::cuda_memory(), {.T = 500, .E = 20, .d = 136, .weight = kF32});
}

// One CTA computes all chunks of the whole batch, several those of its parts.
TEST_P(SimulatedLogits, DependOnNoOtherToken) {
  verify::Memory& memory = verify::cuda_memory();
  expect_same_bits(memory, {.T = 500, .E = 10, .d = 1608}, {1, 7, 64, 129});
  expect_same_bits(memory, {.T = 500, .E = 10, .d = 1576, .x = kF16, .weight = kF16}, {3, 130});
  expect_same_bits(memory, {.T = 260, .E = 70, .d = 552, .weight = kF32}, {1, 33});
  expect_same_bits(memory, {.T = 500, .E = 150, .d = 536, .logits = kBF16, .biased = true},
                   {1, 40});
  expect_same_bits(memory, {.T = 300, .E = 330, .d = 1096}, {1, 129});
  expect_same_bits(memory, {.T = 300, .E = 328, .d = 1088, .logits = kBF16}, {1, 129});
  expect_same_bits(memory, {.T = 500, .E = 250, .d = 1608, .biased = true}, {1, 60, 300});
}

TEST_P(SimulatedLogits, OfNoTokensAreNone) {
  expect_whole_logits(verify::cuda_memory(), {.T = 0, .E = 9, .d = 64});
}

INSTANTIATE_TEST_SUITE_P(, SimulatedLogits, testing::Values("sm86", "sm90"),
                         [](const auto& of) { return std::string(of.param); });

}  // namespace
}  // namespace tilemoe::test
