// Split-K of the weight gradients over long experts: on reference tiles. The splits determine the
// bits and the required scratch.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/gemm/schedule/cost.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "layer/workspace.h"

namespace tilemoe::cuda {
namespace {

constexpr int kH100 = 132;  // SMs
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

using SplitsOf = int32_t (*)(const tilemoe_experts&, const ScratchSizes&, int sms);

int32_t splits(SplitsOf of, const Layer& layer, int sms = kH100) {
  return of(experts_of(layer), sizes_of(layer), sms);
}

// Layers whose experts cannot be long: no token chooses an expert twice.
TEST(WeightGradientSplits, NoneIfNoExpertCanBeLong) {
  const Layer wide{.T = 8192, .d = 2048, .n = 3072, .E = 8, .K = 2};
  const Layer small_M{.T = 2048, .d = 2048, .n = 768, .E = 128, .K = 8};
  for (const Layer& layer : {wide, small_M}) {
    EXPECT_EQ(splits(weight_gradient_1_splits, layer), 0) << layer.T;
    EXPECT_LT(ExpertRanks::bytes(layer.E, 0), size_t{1} << 16);
  }
  // If ids may repeat within a token, or rows come from elsewhere, an expert can be long.
  for (const tilemoe_routing_kind kind : {TILEMOE_ROUTING_GENERAL, TILEMOE_ROUTING_GROUPED})
    for (Layer layer : {wide, small_M}) {
      layer.kind = kind;
      EXPECT_EQ(splits(weight_gradient_1_splits, layer), kEveryCluster) << layer.T;
    }
  Layer rounded = wide;
  rounded.kind = TILEMOE_ROUTING_ROUNDED;
  EXPECT_EQ(splits(weight_gradient_1_splits, rounded), 0);
}

TEST(WeightGradientSplits, AllIfOneCanBeLong) {
  const Layer fine{.T = 24576, .d = 1536, .n = 256, .E = 128, .K = 8};  // 7b-n256
  EXPECT_EQ(splits(weight_gradient_1_splits, fine), kEveryCluster);
  EXPECT_EQ(splits(weight_gradient_2_splits, fine), kEveryCluster);
  EXPECT_EQ(ExpertRanks::bytes(0, kEveryCluster) >> 20, 33u);
  const Layer one{.T = 8192, .d = 2048, .n = 3072, .E = 1, .K = 1, .activation = TILEMOE_SILU};
  EXPECT_EQ(splits(weight_gradient_2_splits, one), kEveryCluster);
}

TEST(WeightGradientSplits, PartsThatMayBeRequestedAlone) {
  // The tiles of one part are few enough to be split, those of both parts are not.
  Layer layer{.T = 8192, .d = 2048, .n = 2304, .E = 8, .K = 2, .layout = TILEMOE_GATE_SPLIT};
  const auto of_parts = [&](bool dW1, bool dW1_up) {
    ScratchSizes sizes = sizes_of(layer);
    sizes.dW1 = dW1, sizes.dW1_up = dW1_up;
    return weight_gradient_1_splits(experts_of(layer), sizes, kH100);
  };
  EXPECT_EQ(of_parts(true, false), kEveryCluster);
  EXPECT_EQ(of_parts(false, true), kEveryCluster);
  EXPECT_EQ(of_parts(true, true), kEveryCluster);
  layer.layout = TILEMOE_GATE_CONCATENATED;
  EXPECT_EQ(of_parts(true, false), 0);  // one tensor always has both
}

// The step's number of splits is at least that of each GEMM that it may run.
TEST(WeightGradientSplits, CoverEveryGemm) {
  for (const int64_t T : {512, 1024, 1025, 4096, 20000})
    for (const int64_t d : {64, 520, 2048})
      for (const int64_t n : {8, 200, 768, 3072})
        for (const int64_t K : {1, 4})
          for (const int sms : {2, 78, 132})
            for (const auto layout :
                 {TILEMOE_GATE_CONCATENATED, TILEMOE_GATE_INTERLEAVED, TILEMOE_GATE_SPLIT}) {
              const Layer layer{.T = T, .d = d, .n = n, .E = 8, .K = K, .layout = layout};
              const int32_t all = splits(weight_gradient_1_splits, layer, sms);
              const auto gemm = [&](int64_t columns, int parts) {
                const ScratchSizes sizes = sizes_of(layer);
                return weight_gradient_splits({.dense_columns = columns,
                                               .parts = parts,
                                               .d = d,
                                               .capacity = sizes.capacity,
                                               .of_an_expert = sizes.rows_of_an_expert},
                                              workers_of(0, sms));
              };
              EXPECT_GE(all, gemm(n, 2));
              EXPECT_TRUE(layout != TILEMOE_GATE_INTERLEAVED || all >= gemm(2 * n, 1));
              EXPECT_TRUE(layout != TILEMOE_GATE_SPLIT || all >= gemm(n, 1));
            }
}

// No splits if and only if the kernel's own rule admits no expert: the maximum number of rows that
// an expert may have, among all.
TEST(WeightGradientSplits, AgreeWithTheKernelsRule) {
  for (const int64_t tiles : {1, 6, 48, 192, 263})
    for (const int64_t capacity : {1025, 8192, 100000})
      for (int64_t max_rows = 1; max_rows <= capacity; max_rows *= 3) {
        const int32_t cut = max_splits(tiles, capacity, max_rows, kEveryCluster);
        const int32_t any = max_splits(tiles, capacity, capacity, kEveryCluster);
        EXPECT_TRUE(cut == 0 || cut == any);
        EXPECT_EQ(cut > 0, any > 0 && is_long(max_rows, capacity, tiles, any));
      }
}

// Nor on the number of SMs, if workers are requested.
TEST(WeightGradientSplits, FollowFromTheWorkersAlone) {
  const Layer layer{.T = 24576, .d = 1536, .n = 256, .E = 128, .K = 8};
  for (const SplitsOf of : {weight_gradient_1_splits, weight_gradient_2_splits}) {
    ScratchSizes sizes = sizes_of(layer);
    for (const int32_t workers : {50, 66, 500}) {
      sizes.workers = workers;
      for (const int sms : {1, 78, 132}) EXPECT_EQ(of(experts_of(layer), sizes, sms), workers);
    }
  }
  // One worker never splits, however long an expert is.
  const Layer one{.T = 8192, .d = 128, .n = 64, .E = 1, .K = 1};
  ScratchSizes sizes = sizes_of(one);
  for (const int32_t workers : {1, 2}) {
    sizes.workers = workers;
    EXPECT_EQ(weight_gradient_2_splits(experts_of(one), sizes, kH100), workers == 1 ? 0 : 2);
  }
  EXPECT_EQ(workers_of(0, 1), 1);
}

// Every k block is in one split, and the sizes of splits differ by at most one.
TEST(WeightGradientSplits, CutALineIntoEqualParts) {
  for (const int32_t k_blocks : {0, 7, 15, 16, 529, 100'000})
    for (const int32_t max_count : {0, 2, 66, 1000}) {
      const Splits cut = Splits::of(k_blocks, max_count);
      EXPECT_LE(cut.count, max_count);
      EXPECT_TRUE(cut.count == max_count || cut.count == k_blocks / kMinSplit);
      int32_t at = 0, min = INT32_MAX, max = 0;
      for (int32_t split = 0; split < cut.count; ++split) {
        EXPECT_EQ(cut.begin(split), at);
        const int32_t mine = cut.begin(split + 1) - at;
        min = std::min(min, mine), max = std::max(max, mine), at += mine;
      }
      for (const int32_t past : {cut.count, cut.count + 1}) EXPECT_EQ(cut.begin(past), k_blocks);
      if (cut.count == 0) continue;
      EXPECT_EQ(at, k_blocks);
      EXPECT_GE(min, kMinSplit);
      EXPECT_LE(max, min + 1);
    }
}

// The halves of all reference tiles are all blocks of D, each once. The last of an odd number of
// row blocks has column blocks as halves, and may have only one.
TEST(ReferenceTilesOf, AWeightGradientAreItsBlocks) {
  for (const int64_t d : {8, 128, 136, 256, 384, 1032})
    for (const int64_t n : {8, 136, 200, 264, 768, 2880})
      for (const int parts : {1, 2}) {
        const auto reference = ReferenceTiles::of(d, n, parts);
        ASSERT_EQ(reference.m_blocks, (d + 127) / 128);
        ASSERT_EQ(reference.n_blocks, parts * ((n + column_block(n) - 1) / column_block(n)));
        std::map<std::pair<int32_t, int32_t>, int> met;
        int none = 0;
        for (int32_t number = 0; number < reference.count(); ++number) {
          const auto first = reference.half(number, 0), second = reference.half(number, 1);
          EXPECT_EQ(first.same_columns, second.same_columns);
          EXPECT_EQ(first.same_columns,
                    first.n_block == second.n_block && second.m_block < reference.m_blocks);
          EXPECT_TRUE(first.same_columns ? first.m_block + 1 == second.m_block
                                         : first.m_block + 1 == reference.m_blocks);
          for (const auto& half : {first, second})
            if (half.m_block == reference.m_blocks)
              ++none;
            else
              ++met[{half.m_block, half.n_block}];
        }
        EXPECT_EQ(none, reference.m_blocks % 2 * (reference.n_blocks % 2));
        EXPECT_EQ(met.size(), static_cast<size_t>(reference.m_blocks) *
                                  static_cast<size_t>(reference.n_blocks));
        for (const auto& [block, times] : met) {
          EXPECT_EQ(times, 1);
          EXPECT_LT(block.first, reference.m_blocks);
          EXPECT_LT(block.second, reference.n_blocks);
        }
      }
}

// Tiles with close numbers need the same rows of D: after a group of columns the next rows.
TEST(ReferenceTilesOf, AWeightGradientComeInGroupsOfColumns) {
  const ReferenceTiles reference{.m_blocks = 4, .n_blocks = 11};
  std::vector<std::pair<int32_t, int32_t>> order;
  for (int32_t number = 0; number < reference.count(); ++number) {
    const auto half = reference.half(number, 0);
    order.emplace_back(half.m_block, half.n_block);
  }
  ASSERT_EQ(order.size(), 22u);
  EXPECT_EQ(order[7], std::pair(0, 7));
  EXPECT_EQ(order[8], std::pair(2, 0));
  EXPECT_EQ(order[16], std::pair(0, 8));
  EXPECT_EQ(order[21], std::pair(2, 10));
}

// Each block of 256 rows and of columns once, by groups of columns; an odd last block of 128 rows
// has one, too.
TEST(ReferenceTilesOf, AWeightGradientHaveEqualBlocksOfAllRows) {
  for (const int32_t m_blocks : {1, 2, 5, 8})
    for (const int32_t n_blocks : {1, 8, 11}) {
      const ReferenceTiles reference{.m_blocks = m_blocks, .n_blocks = n_blocks};
      ASSERT_EQ(reference.whole_blocks(), (m_blocks + 1) / 2 * n_blocks);
      std::vector<std::tuple<int32_t, int32_t, int32_t>> met;  // group of columns, rows, columns
      for (int32_t number = 0; number < reference.whole_blocks(); ++number) {
        const auto block = reference.whole_block(number);
        EXPECT_LT(block.m_block, (m_blocks + 1) / 2);
        EXPECT_LT(block.n_block, n_blocks);
        met.emplace_back(block.n_block / ReferenceTiles::kGroup, block.m_block, block.n_block);
      }
      EXPECT_TRUE(std::is_sorted(met.begin(), met.end()));
      EXPECT_EQ(std::adjacent_find(met.begin(), met.end()), met.end());
    }
}

TEST(ReferenceTilesOf, AWeightGradientAreNarrowWhereWideOnesWaste) {
  EXPECT_EQ(column_block(192), 192);
  EXPECT_EQ(column_block(256), 256);
  EXPECT_EQ(column_block(768), 256);  // neither wastes any
  EXPECT_EQ(column_block(2880), 192);
}

}  // namespace
}  // namespace tilemoe::cuda
