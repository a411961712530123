// The cases of the forward and of the backward steps, in one table.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/activation_kinds.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"

namespace tilemoe::test {

enum Passes : uint32_t { kForward = 1, kBackward = 2, kBoth = 3 };

// Differences of a case from bfloat16, concatenated gate and up rows, dense last dimensions, small
// whole numbers, gathered rows, and every output.
enum Flags : uint32_t {
  kFloat16 = 1 << 0,
  kInterleaved = 1 << 1,
  kSplit = 1 << 2,
  kW1Transposed = 1 << 3,
  kW2Transposed = 1 << 4,
  kTransposed = kW1Transposed | kW2Transposed,
  kInterleavedColumns = kInterleaved | kW1Transposed,
  kGrouped = 1 << 5,
  kUnitScale = 1 << 6,
  kBiases = 1 << 7,  // forward's
  kWithoutH = 1 << 8,
  kFloatGradients = 1 << 9,  // backward's, from here on
  kAccumulate = 1 << 10,
  kDHOverH = 1 << 11,
  kWithoutScores = 1 << 12,
  kWithoutDH = 1 << 13,
  kWithoutAScaled = 1 << 14,
  kWithoutDs = 1 << 15,
};

struct StepCase {
  std::string name;
  uint32_t passes;
  std::vector<int32_t> counts;  // rows of each expert
  int64_t T, d, n;
  int64_t spare_rows = 0;  // capacity past M
  uint32_t flags = 0;
  tilemoe_activation activation = TILEMOE_REGLU;
  int32_t nan_expert = -1;
  std::optional<cuda::TileConfiguration> tile = {};  // the one chosen, if none is given
  float clamp = 0, alpha = 0, up_shift = 0;

  bool has(uint32_t flag) const { return (flags & flag) != 0; }
  tilemoe_dtype dtype() const { return has(kFloat16) ? TILEMOE_FLOAT16 : TILEMOE_BFLOAT16; }
  tilemoe_gate_layout gate_layout() const {
    return has(kInterleaved) ? TILEMOE_GATE_INTERLEAVED
           : has(kSplit)     ? TILEMOE_GATE_SPLIT
                             : TILEMOE_GATE_CONCATENATED;
  }
  // Whether the device has interleaved gate and up columns of H; the host has them one after the
  // other.
  bool interleaved_columns() const { return has(kInterleaved) && has(kW1Transposed); }
};

inline void PrintTo(const StepCase& c, std::ostream* out) {
  *out << c.name;
}

inline std::vector<StepCase> step_cases(Passes pass) {
  const std::vector<int32_t> ragged = {129, 0, 1, 64, 300, 127, 0, 128};
  const std::vector<int32_t> many = {2000, 1500, 33, 1025, 900}, one = {1};
  const std::vector<int32_t> crowd(300, 7);
  std::vector<int32_t> long_among_many(700, 3);
  long_among_many[77] = 3000, long_among_many[699] = 1100, long_among_many[300] = 0;
  constexpr auto kReGLU = TILEMOE_REGLU, kIdentity = TILEMOE_IDENTITY, kSwiGLU = TILEMOE_SWIGLU;
  std::vector<StepCase> all = {
      {"any_tile", kForward, ragged, 37, 256, 192, 77},
      {"ragged", kBackward, ragged, 37, 256, 192, 77},
      {"odd_widths", kBoth, ragged, 37, 200, 72, 5},
      {"tiny", kBoth, one, 1, 8, 8},
      {"one_expert_has_all", kBoth, {0, 0, 700, 0}, 37, 136, 264},
      {"no_row", kBoth, {0, 0, 0}, 37, 64, 64, 40},
      {"many_experts", kBoth, crowd, 37, 72, 40, 200},
      {"many_tiles", kBoth, many, 1000, 1032, 520},
      {"grouped", kForward, ragged, 37, 256, 192, 130, kGrouped},
      {"grouped", kBackward, ragged, 37, 256, 192, 33, kGrouped},
      {"nan_expert", kBoth, ragged, 37, 256, 192, 90, 0, kReGLU, 4},
      {"interleaved_columns_nan_expert", kBoth, ragged, 37, 256, 192, 90, kInterleavedColumns,
       kReGLU, 4},
      {"interleaved", kForward, ragged, 37, 256, 136, 0, kInterleaved | kBiases},
      {"split", kForward, ragged, 37, 256, 136, 0, kSplit | kBiases},
      {"biases", kForward, ragged, 37, 256, 136, 0, kBiases},
      {"transposed", kForward, ragged, 37, 200, 136, 0, kTransposed},
      {"transposed_split", kForward, ragged, 37, 256, 192, 0, kSplit | kTransposed},
      {"interleaved_columns", kForward, ragged, 37, 200, 136, 77,
       kInterleavedColumns | kW2Transposed | kBiases},
      {"interleaved_columns_tiny", kForward, one, 1, 8, 8, 0, kInterleavedColumns},
      {"interleaved_columns_grouped", kForward, ragged, 37, 264, 328, 9,
       kInterleavedColumns | kGrouped | kFloat16},
      {"interleaved_columns_inference", kForward, ragged, 37, 256, 192, 0,
       kInterleavedColumns | kWithoutH},
      {"interleaved_columns_many_tiles", kForward, many, 1000, 1032, 520, 0, kInterleavedColumns},
      {"float16", kForward, ragged, 37, 256, 192, 0, kFloat16},
      {"float16_transposed", kForward, ragged, 37, 256, 192, 0, kFloat16 | kTransposed},
      {"identity", kForward, ragged, 37, 256, 328, 0, kBiases, kIdentity},
      {"identity_transposed", kForward, ragged, 37, 256, 328, 0, kTransposed, kIdentity},
      {"relu_squared", kForward, ragged, 37, 64, 328, 0, 0, TILEMOE_RELU_SQUARED},
      {"inference", kForward, ragged, 37, 256, 192, 0, kWithoutH},
      {"nan_expert_grouped", kBackward, ragged, 37, 72, 40, 90, kGrouped, kReGLU, 2},
      {"nan_expert_long", kBackward, {1500, 64, 2100, 3, 1400}, 37, 264, 136, 90, 0, kReGLU, 2},
      {"long_expert_alone", kBackward, {4097}, 37, 264, 520, 30},
      {"long_expert_among_many", kBackward, long_among_many, 37, 40, 72},
      {"dH_over_H", kBackward, ragged, 37, 200, 328, 20, kDHOverH},
      {"dH_over_H_many_tiles", kBackward, many, 1000, 264, 1032, 0, kDHOverH},
      {"no_scores", kBackward, ragged, 37, 200, 136, 0, kWithoutScores},
      {"only_dH", kBackward, ragged, 37, 200, 136, 0, kWithoutAScaled | kWithoutDs},
      {"only_ds", kBackward, ragged, 37, 200, 136, 0, kWithoutDH | kWithoutAScaled},
      {"only_A_scaled", kBackward, ragged, 37, 200, 136, 0, kWithoutDH | kWithoutDs},
      {"interleaved_columns_dH_over_H", kBackward, ragged, 37, 200, 328, 20,
       kInterleavedColumns | kDHOverH},
      {"interleaved_columns_many_tiles", kBackward, many, 1000, 264, 1032, 0,
       kInterleavedColumns | kW2Transposed | kDHOverH},
      {"interleaved_columns_unit_scale", kBackward, ragged, 37, 520, 328, 0,
       kInterleavedColumns | kUnitScale, kSwiGLU},
      {"unit_scale", kBackward, ragged, 37, 520, 328, 0, kUnitScale},
  };
  for (const auto& [name, tile] :
       {std::pair("_cooperative256", cuda::kCooperative256),
        std::pair("_cluster256", cuda::kCluster256), std::pair("_cluster192", cuda::kCluster192),
        std::pair("_pingpong128", cuda::kPingPong128),
        std::pair("_pingpong192", cuda::kPingPongCluster192),
        std::pair("_pingpong64", cuda::kPingPong64)}) {
    const auto add = [&, suffix = name, tile = tile](const std::string& kind, uint32_t flags) {
      all.push_back({"swiglu" + kind + suffix, kForward, ragged, 37, 512, 328, 77,
                     kUnitScale | flags, kSwiGLU, -1, tile});
    };
    add("", 0), add("_biases", kBiases), add("_grouped", kBiases | kGrouped);
    add("_inference", kBiases | kWithoutH), add("_t", kTransposed);
    all.push_back({std::string("swiglu_many_tiles") + name, kForward, many, 1000, 1032, 520, 77,
                   kUnitScale | kBiases, kSwiGLU, -1, tile});
    for (const auto& [kind, flags] : {std::pair("down", 0u), std::pair("down_t", +kW2Transposed)})
      all.push_back(
          {std::string(kind) + name, kForward, many, 1000, 1032, 520, 0, flags, kReGLU, -1, tile});
  }
  for (const bool columns : {false, true}) {
    const cuda::Variant clamped{.weights = columns ? cuda::Major::kMN : cuda::Major::kK,
                                .activations = cuda::Activations::kClampedSwiGLU,
                                .interleaved_columns = columns};
    const uint32_t flags = kUnitScale | kBiases | (columns ? kInterleavedColumns : kInterleaved);
    for (const cuda::TileConfiguration& tile :
         cuda::tiles_of({cuda::GemmName::kUpProjection, cuda::ArchName::kSm90, clamped})) {
      const std::string name = std::string("gpt_oss_") + (columns ? "t_" : "") +
                               std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
                               (tile.cluster > 1 ? "_pairs" : "");
      all.push_back(
          {name, kForward, ragged, 37, 512, 328, 77, flags, kSwiGLU, -1, tile, 1.5f, 1.702f, 1.f});
      all.push_back({name + "_many", kForward, many, 1000, 1032, 520, 77, flags, kSwiGLU, -1, tile,
                     1.5f, 1.702f, 1.f});
    }
  }
  // Every layout, with every dtype of the gradients, written and added; and again with experts that
  // are long enough for split-K of the weight gradients. Each of them occurs with either tile,
  // which follows from n in a weight gradient.
  struct Layout {
    const char* name;
    uint32_t flags;
    tilemoe_activation activation = kReGLU;
  };
  constexpr std::pair<uint32_t, const char*> kDTypes[] = {{0, "_bf16"}, {kFloat16, "_fp16"}};
  for (const Layout& layout :
       {Layout{"concat", 0}, Layout{"concat_t", kTransposed}, Layout{"interleaved", kInterleaved},
        Layout{"columns", kInterleavedColumns | kW2Transposed}, Layout{"split", kSplit},
        Layout{"split_t", kSplit | kTransposed}, Layout{"plain", 0, kIdentity},
        Layout{"plain_t", kTransposed, kIdentity}})
    for (const auto& [dtype, dtype_name] : kDTypes)
      for (const uint32_t gradients : {0u, uint32_t{kFloatGradients}})
        for (const uint32_t accumulate : {0u, uint32_t{kAccumulate}})
          for (const bool is_long : {false, true}) {
            const bool wide = is_long == (accumulate != 0);
            all.push_back({std::string(layout.name) + dtype_name + (gradients ? "_fp32" : "") +
                               (accumulate ? "_added" : "") + (is_long ? "_long" : ""),
                           kBackward, is_long ? std::vector<int32_t>{70, 1301, 0, 2000} : ragged,
                           37, gradients ? 264 : 200, wide ? 200 : 136, 9,
                           layout.flags | dtype | gradients | accumulate, layout.activation, -1,
                           wide ? cuda::kCluster256 : cuda::kCluster192});
          }
  for (const auto& [dtype, dtype_name] : kDTypes)
    for (const uint32_t transposed : {0u, uint32_t{kW1Transposed}})
      for (const bool wide : {false, true})
        all.push_back({std::string(wide ? "cluster256" : "cluster192") + dtype_name +
                           (transposed ? "_transposed" : ""),
                       kBackward,
                       {300, 1, 0, 640, 129},
                       37,
                       1032,
                       wide ? 200 : 136,
                       60,
                       dtype | transposed,
                       kReGLU,
                       3,
                       wide ? cuda::kCluster256 : cuda::kCluster192});
  all.push_back({"whole192",
                 kBackward,
                 {300, 1, 0, 640, 129},
                 37,
                 1032,
                 136,
                 60,
                 0,
                 kReGLU,
                 3,
                 cuda::kWhole192});
  all.push_back({"whole192_long_added",
                 kBackward,
                 {70, 1301, 0, 2000},
                 37,
                 328,
                 136,
                 9,
                 kAccumulate,
                 kReGLU,
                 -1,
                 cuda::kWhole192});
  for (tilemoe_activation activation : kActivations) {
    const std::string name = tilemoe_activation_name(activation);
    const uint32_t half = kUnitScale | kFloat16;
    all.push_back({name + "_float16", kForward, ragged, 37, 256, 192, 0, half, activation});
    all.push_back({name + "_float16", kBackward, ragged, 37, 200, 264, 0, half, activation});
    all.push_back({name, kBackward, ragged, 37, 200, 264, 0, kUnitScale, activation});
  }
  for (const bool transposed : {false, true}) {
    const cuda::Variant swiglu{.weights = transposed ? cuda::Major::kK : cuda::Major::kMN,
                               .activations = cuda::Activations::kSwiGLU};
    const uint32_t flags = kUnitScale | (transposed ? kTransposed : 0u);
    for (const cuda::TileConfiguration& tile :
         cuda::tiles_of({cuda::GemmName::kActivationGradient, cuda::ArchName::kSm90, swiglu})) {
      const std::string name = std::string(transposed ? "t_" : "") +
                               (tile.cluster == 1 ? "single" : "cluster") +
                               std::to_string(tile.block_n);
      const bool wide = tile.block_n == 256;
      all.push_back(
          {name, kBackward, ragged, 37, 200, wide ? 248 : 264, 77, flags, kSwiGLU, -1, tile});
      all.push_back({name + "_many_dH_over_H", kBackward, many, 1000, 1032, wide ? 760 : 776, 77,
                     flags | kDHOverH, kSwiGLU, -1, tile});
    }
  }
  for (const Passes either : {kForward, kBackward}) {
    const bool forward = either == kForward;
    StepCase c{"clamped_swiglu",
               either,
               ragged,
               37,
               forward ? 256 : 200,
               forward ? 192 : 136,
               0,
               kUnitScale | (forward ? kBiases : 0u),
               kSwiGLU,
               -1,
               {},
               forward ? 1.5f : 1.25f,
               1.702f,
               1.f};
    all.push_back(c);
    c.name = "gpt_oss", c.flags |= kInterleavedColumns | kW2Transposed;
    all.push_back(c);
    c.name = "gpt_oss_float16", c.flags |= kFloat16;
    all.push_back(c);
  }
  std::erase_if(all, [pass](const StepCase& c) { return (c.passes & pass) == 0; });
  return all;
}

#define STEP_TESTS(suite, pass)                                          \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(step_cases(pass)), \
                           [](const auto& instance) { return instance.param.name; })

}  // namespace tilemoe::test
