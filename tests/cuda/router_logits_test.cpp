// router_logits on a GPU: the large tiles and the small ones, with their sums of chunks in one CTA
// and in several.
#include "router_logits_support.h"

namespace tilemoe::test {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

// On sm90 (132 SMs) a CTA stores rows of two tiles by 16 bytes, in pairs of CTAs and alone.
constexpr LogitsCase kInPairs{.T = 8704, .E = 248, .d = 584, .logits = kBF16};
constexpr LogitsCase kAlone{.T = 8192, .E = 328, .d = 576, .logits = kBF16};

TEST(CudaRouterLogits, AreExactOnWholeNumbers) {
  verify::Memory& memory = verify::cuda_memory();
  for (const int64_t T : {0, 1, 17, 300, 3000})
    for (const int64_t E : {1, 13, 64, 250})
      for (const int64_t d : {8, 512, 4168})
        expect_whole_logits(memory, {.T = T, .E = E, .d = d, .biased = true});
  for (const int64_t T : {5, 700}) {
    expect_whole_logits(memory, {.T = T,
                                 .E = 72,
                                 .d = 600,
                                 .x = kF16,
                                 .weight = kF16,
                                 .logits = kF16,
                                 .biased = true,
                                 .padded = true});
    expect_whole_logits(memory, {.T = T, .E = 130, .d = 600, .logits = kBF16, .padded = true});
    expect_whole_logits(memory, {.T = T, .E = 130, .d = 600, .weight = kF32, .padded = true});
  }
  expect_whole_logits(memory, kInPairs);
  expect_whole_logits(memory, kAlone);
}

TEST(CudaRouterLogits, HaveAllBitsOfAFloat32Weight) {
  for (const int64_t T : {3, 1500})
    expect_whole_weights(verify::cuda_memory(), {.T = T, .E = 70, .d = 600, .weight = kF32});
}

// One CTA computes all chunks of the whole batch: its tiles are more than the SMs of any GPU.
TEST(CudaRouterLogits, DependOnNoOtherToken) {
  verify::Memory& memory = verify::cuda_memory();
  const std::vector<int64_t> sizes = {1, 7, 64, 1000, 5000, 20000};
  for (const int64_t E : {40, 128, 200})
    for (const DType x : {kBF16, kF16})
      expect_same_bits(memory, {.T = 32768, .E = E, .d = 2184, .x = x, .weight = x}, sizes);
  expect_same_bits(memory, {.T = 32768, .E = 130, .d = 600, .weight = kF32, .biased = true}, sizes);
  // On sm90 a CTA has two tiles of the same tokens, or one without a second (132 SMs).
  expect_same_bits(memory, {.T = 32768, .E = 200, .d = 1096, .weight = kF32, .biased = true},
                   sizes);
  expect_same_bits(memory, kInPairs, {1, 700, 5000});
  expect_same_bits(memory, kAlone, {1, 700, 5000});
  for (const DType weight : {kBF16, kF32})
    expect_same_bits(memory, {.T = 8192, .E = 330, .d = 1096, .weight = weight}, {1, 700, 5000});
}

TEST(CudaRouterLogits, RefuseFloat32Tokens) {
  verify::GuardedTensor X(verify::cuda_memory(), kF32, {4, 64}),
      logits(verify::cuda_memory(), kF32, {4, 8}), weight(verify::cuda_memory(), kF32, {8, 64});
  verify::GuardedBuffer workspace(verify::cuda_memory(), size_t{1} << 20);
  const auto call = [&](const ConstTensor& tokens) {
    router_logits({.device = Device::kCuda,
                   .X = tokens,
                   .weight = weight.view(),
                   .logits = logits.view(),
                   .workspace = workspace.data(),
                   .workspace_bytes = workspace.bytes()});
  };
  EXPECT_THROW(call(X.view()), Error);
  verify::GuardedTensor halves(verify::cuda_memory(), kF16, {4, 64});
  EXPECT_THROW(call(halves.view()), Error);
}

}  // namespace
}  // namespace tilemoe::test
