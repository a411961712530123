// When the weight gradients cut experts into shares, which decides what scratch they ask for.
#include "cuda/schedule/weight_gradient_shares.h"

#include <gtest/gtest.h>

#include "cuda/schedule/expert_ranks.h"
#include "layer_plan.h"

namespace tilemoe::cuda {
namespace {

constexpr int kH100 = 132;  // multiprocessors
constexpr int32_t kEveryCluster = kH100 / 2;

struct Layer {
  int64_t T, d, n, E, K;
  tilemoe_gate_layout layout = TILEMOE_GATE_CONCATENATED;
  tilemoe_activation activation = TILEMOE_SWIGLU;
  tilemoe_routing_kind kind = TILEMOE_ROUTING_TOP_K;
};

tilemoe_experts experts_of(const Layer& layer) {
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = TILEMOE_BFLOAT16;
  experts.d = layer.d, experts.n = layer.n, experts.E = layer.E;
  experts.activation = layer.activation, experts.gate_layout = layer.layout;
  return experts;
}

ScratchSizes sizes_of(const Layer& layer) {
  tilemoe_routing_spec spec{};
  spec.kind = layer.kind, spec.T = layer.T;
  return {.capacity = layer.T * layer.K, .rows_of_an_expert = rows_of_an_expert(spec)};
}

int32_t shares(Step step, const Layer& layer, int multiprocessors = kH100) {
  return weight_gradient_shares(step, experts_of(layer), sizes_of(layer), multiprocessors);
}

// Layers whose experts cannot be long: no token chooses one twice.
TEST(WeightGradientShares, NoneWhereNoExpertCanBeLong) {
  const Layer wide{.T = 8192, .d = 2048, .n = 3072, .E = 8, .K = 2};
  const Layer few_rows{.T = 2048, .d = 2048, .n = 768, .E = 128, .K = 8};
  for (const Layer& layer : {wide, few_rows}) {
    EXPECT_EQ(shares(Step::kWeightGradient1, layer), 0) << layer.T;
    EXPECT_LT(ExpertRanks::bytes(layer.E, 0), size_t{1} << 16);
  }
  // Where ids may repeat within a token, or rows come from elsewhere, one can.
  for (const tilemoe_routing_kind kind : {TILEMOE_ROUTING_GENERAL, TILEMOE_ROUTING_GROUPED})
    for (Layer layer : {wide, few_rows}) {
      layer.kind = kind;
      EXPECT_EQ(shares(Step::kWeightGradient1, layer), kEveryCluster) << layer.T;
    }
  Layer rounded = wide;
  rounded.kind = TILEMOE_ROUTING_ROUNDED;
  EXPECT_EQ(shares(Step::kWeightGradient1, rounded), 0);
}

TEST(WeightGradientShares, AllWhereOneCan) {
  const Layer fine{.T = 24576, .d = 1536, .n = 256, .E = 128, .K = 8};  // 7b-n256
  EXPECT_EQ(shares(Step::kWeightGradient1, fine), kEveryCluster);
  EXPECT_EQ(shares(Step::kWeightGradient2, fine), kEveryCluster);
  EXPECT_EQ(ExpertRanks::bytes(0, kEveryCluster) >> 20, 33u);
  const Layer one{.T = 8192, .d = 2048, .n = 3072, .E = 1, .K = 1, .activation = TILEMOE_SILU};
  EXPECT_EQ(shares(Step::kWeightGradient2, one), kEveryCluster);
}

TEST(WeightGradientShares, PartsThatMayBeAskedForAlone) {
  // One part's tiles are few enough to be cut, both parts' are not.
  Layer layer{.T = 8192, .d = 2048, .n = 2304, .E = 8, .K = 2, .layout = TILEMOE_GATE_SPLIT};
  const auto of_parts = [&](bool dW1, bool dW1_up) {
    ScratchSizes sizes = sizes_of(layer);
    sizes.dW1 = dW1, sizes.dW1_up = dW1_up;
    return weight_gradient_shares(Step::kWeightGradient1, experts_of(layer), sizes, kH100);
  };
  EXPECT_EQ(of_parts(true, false), kEveryCluster);
  EXPECT_EQ(of_parts(false, true), kEveryCluster);
  EXPECT_EQ(of_parts(true, true), kEveryCluster);
  layer.layout = TILEMOE_GATE_CONCATENATED;
  EXPECT_EQ(of_parts(true, false), 0);  // of one tensor there are always both
}

// The step's shares are at least those of each product that it may be.
TEST(WeightGradientShares, CoverEveryProduct) {
  for (const int64_t T : {512, 1024, 1025, 4096, 20000})
    for (const int64_t d : {64, 520, 2048})
      for (const int64_t n : {8, 200, 768, 3072})
        for (const int64_t K : {1, 4})
          for (const int multiprocessors : {2, 78, 132})
            for (const auto layout :
                 {TILEMOE_GATE_CONCATENATED, TILEMOE_GATE_INTERLEAVED, TILEMOE_GATE_SPLIT}) {
              const Layer layer{.T = T, .d = d, .n = n, .E = 8, .K = K, .layout = layout};
              const int32_t all = shares(Step::kWeightGradient1, layer, multiprocessors);
              const auto product = [&](int64_t columns, int parts) {
                const ScratchSizes sizes = sizes_of(layer);
                return weight_gradient_shares({.dense_columns = columns,
                                               .parts = parts,
                                               .d = d,
                                               .capacity = sizes.capacity,
                                               .of_an_expert = sizes.rows_of_an_expert},
                                              multiprocessors);
              };
              EXPECT_GE(all, product(n, 2));
              EXPECT_TRUE(layout != TILEMOE_GATE_INTERLEAVED || all >= product(2 * n, 1));
              EXPECT_TRUE(layout != TILEMOE_GATE_SPLIT || all >= product(n, 1));
            }
}

// No share where the kernel's own rule lets no expert through, and only there: the most rows that
// an expert may have, among all.
TEST(WeightGradientShares, AgreeWithTheKernelsRule) {
  for (const int64_t tiles : {1, 6, 48, 192, 263})
    for (const int64_t capacity : {1025, 8192, 100000})
      for (int64_t most = 1; most <= capacity; most *= 3) {
        const int32_t cut = shares_at_most(tiles, capacity, most, kEveryCluster);
        const int32_t any = shares_at_most(tiles, capacity, capacity, kEveryCluster);
        EXPECT_TRUE(cut == 0 || cut == any);
        EXPECT_EQ(cut > 0, any > 0 && is_long(most, capacity, tiles, any));
      }
}

}  // namespace
}  // namespace tilemoe::cuda
