// The kernels of router_logits on a simulated GPU, in both forms and all tiles.
#include "router_logits_support.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"

namespace tilemoe::test {
namespace {

// Of few SMs, so that a few tiles have one CTA for all chunks, or of many.
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
  constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
  for (const int64_t T : {1, 17, 200})
    for (const int64_t d : {8, 72, 1024, 2120}) {
      expect_whole_logits(memory, {.T = T, .E = 13, .d = d});
      expect_whole_logits(memory, {.T = T,
                                   .E = 72,
                                   .d = d,
                                   .x = kF16,
                                   .weight = kF16,
                                   .logits = kF16,
                                   .biased = true,
                                   .padded = true});
    }
  expect_whole_logits(memory, {.T = 129, .E = 260, .d = 1088, .logits = kBF16, .biased = true});
  expect_whole_logits(memory, {.T = 300, .E = 1, .d = 1032});
  expect_whole_logits(memory, {.T = 40, .E = 130, .d = 1096, .weight = kF32, .padded = true});
}

TEST_P(SimulatedLogits, HaveAllBitsOfAFloat32Weight) {
  for (const int64_t T : {3, 150})
    expect_whole_weights(verify::cuda_memory(),
                         {.T = T, .E = 20, .d = 1192, .weight = DType::kFloat32});
}

TEST_P(SimulatedLogits, DependOnNoOtherToken) {
  verify::Memory& memory = verify::cuda_memory();
  expect_same_bits(memory, {.T = 300, .E = 70, .d = 2184}, {1, 7, 64, 129});
  expect_same_bits(memory, {.T = 260, .E = 16, .d = 1160, .weight = DType::kFloat32}, {1, 33});
  expect_same_bits(
      memory, {.T = 140, .E = 264, .d = 1048, .logits = DType::kBFloat16, .biased = true}, {1, 40});
}

TEST_P(SimulatedLogits, OfNoTokensAreNone) {
  expect_whole_logits(verify::cuda_memory(), {.T = 0, .E = 9, .d = 64});
}

INSTANTIATE_TEST_SUITE_P(, SimulatedLogits, testing::Values("sm86", "sm90"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tilemoe::test
