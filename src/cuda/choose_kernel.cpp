#include "cuda/choose_kernel.h"

#include <algorithm>
#include <span>

#include "core/activation_kinds.h"
#include "core/check.h"
#include "cuda/arch.h"
#include "cuda/core/device.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/two_cta.h"

namespace tilemoe::cuda {

namespace {

KitName kit() {
  return kit_of(current_device());
}
DeviceModel model(KitName kit) {
  const int multiprocessors = current_device().multiprocessors;
  switch (kit) {
    case KitName::kSm80: return mma_sync_model(multiprocessors);
    case KitName::kSm90: return hopper_model(multiprocessors);
    case KitName::kSm100: return blackwell_model(multiprocessors);
  }
  TILEMOE_ASSERT(false, "kit " << static_cast<int>(kit) << " has no model of its tiles");
}

Major major_of(const tilemoe_tensor& weights) {
  return weights.stride[2] == 1 ? Major::kK : Major::kMN;
}
Major major_of_transpose(const tilemoe_tensor& weights) {
  return weights.stride[2] == 1 ? Major::kMN : Major::kK;
}

Activations activations_of(const tilemoe_experts& experts) {
  return tilemoe_activation_gated(experts.activation) != 0 ? Activations::kGated
                                                           : Activations::kPlain;
}

// The first key, if there are kernels of it.
ProductKey either(const ProductKey& special, const ProductKey& general) {
  return Tiles(special).empty() ? general : special;
}

// Tiles that the model chooses among. Whether pairs of blocks multiply is not its choice on 10.x,
// where nothing is measured.
std::span<const TileConfiguration> offered(const Tiles& tiles, KitName kit) {
  const std::span<const TileConfiguration> all(tiles.data(), tiles.size());
  if (kit != KitName::kSm100) return all;
  const int cluster = sm100::pairs_asked_for() ? 2 : 1;
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const auto& tile) { return tile.cluster == cluster; });
  return found == all.end() ? all : std::span(found, 1);
}

template <class Step>
TileConfiguration choose(const Step& step, const ProductKey& key) {
  const Tiles tiles(key);
  TILEMOE_ASSERT(!tiles.empty(), "a step without a kernel");
  const TileConfiguration* const asked = step.tuning.tile;
  if (asked != nullptr && std::find(tiles.begin(), tiles.end(), *asked) != tiles.end())
    return *asked;
  return choose_tile(size_of(step), offered(tiles, key.kit), model(key.kit));
}

template <class Step>
void run(const Step& step) {
  const ProductKey key = key_of(step);
  start(key, choose(step, key), step);
}

}  // namespace

ProductKey key_of(const UpProjection& step) {
  const tilemoe_experts& experts = *step.experts;
  const tilemoe_tensor& W1 = step.weights.W1;
  Variant general{.recipe = recipe_of(experts.dtype),
                  .weights = major_of(W1),
                  .activations = activations_of(experts),
                  .adjacent = has_adjacent_columns(experts, W1)};
  Variant special = general;
  special.activations = Activations::kSwiGLU;
  special.gathers = step.rows.token != nullptr;
  const ProductKey key{ProductName::kUpProjection, kit(), general};
  return is_plain_swiglu(experts) ? either({key.product, key.kit, special}, key) : key;
}

ProductKey key_of(const DownProjection& step) {
  return {ProductName::kDownProjection,
          kit(),
          {.recipe = recipe_of(step.experts->dtype), .weights = major_of(step.W2)}};
}

ProductKey key_of(const ActivationGradient& step) {
  const tilemoe_experts& experts = *step.experts;
  Variant general{.recipe = recipe_of(experts.dtype),
                  .weights = major_of_transpose(step.W2),
                  .activations = activations_of(experts)};
  Variant special = general;
  special.activations = Activations::kSwiGLU;
  const ProductKey key{ProductName::kActivationGradient, kit(), general};
  const bool plain = is_plain_swiglu(experts) && !has_adjacent_columns(experts, step.W1);
  return plain ? either({key.product, key.kit, special}, key) : key;
}

ProductKey key_of(const InputGradient& step) {
  return {
      ProductName::kInputGradient,
      kit(),
      {.recipe = recipe_of(step.experts->dtype), .weights = major_of_transpose(step.weights.W1)}};
}

TileConfiguration tile_of(const UpProjection& step) {
  return choose(step, key_of(step));
}
TileConfiguration tile_of(const DownProjection& step) {
  return choose(step, key_of(step));
}
TileConfiguration tile_of(const ActivationGradient& step) {
  return choose(step, key_of(step));
}
TileConfiguration tile_of(const InputGradient& step) {
  return choose(step, key_of(step));
}

void up_projection(const UpProjection& step) {
  run(step);
}
void down_projection(const DownProjection& step) {
  run(step);
}
void activation_gradient(const ActivationGradient& step) {
  run(step);
}
void input_gradient(const InputGradient& step) {
  run(step);
}

namespace {

// What a weight gradient's kernel is compiled for of its output.
struct GradientOutput {
  bool is_float32;
  OutputMajor major;
  bool operator==(const GradientOutput&) const = default;
};
GradientOutput output_of(const tilemoe_tensor& out) {
  return {.is_float32 = out.dtype == TILEMOE_FLOAT32,
          .major = out.stride[2] == 1 ? OutputMajor::kColumn : OutputMajor::kRow};
}

void run_weight_gradient(WeightGradient step, int32_t workers) {
  if (step.parts == 0) return;
  step.shares = weight_gradient_shares({.dense_columns = step.dense_columns,
                                        .parts = step.parts,
                                        .d = step.gathered.shape[1],
                                        .capacity = step.rows.capacity,
                                        .of_an_expert = step.rows.of_an_expert},
                                       workers_of(workers, current_device().multiprocessors));
  const GradientOutput out = output_of(step.part[0].out);
  for (int p = 1; p < step.parts; ++p)
    TILEMOE_ASSERT(output_of(step.part[p].out) == out,
                   "a weight gradient's parts differ in dtype or major");
  const ProductKey key{
      ProductName::kWeightGradient,
      kit(),
      {.recipe = recipe_of(step.experts->dtype), .float_out = out.is_float32, .out = out.major}};
  const Tiles tiles(key);
  // A block's tile is a half of a reference tile.
  const auto* const tile = std::find_if(tiles.begin(), tiles.end(), [&](const auto& each) {
    return each.block_n == column_block(step.dense_columns);
  });
  TILEMOE_ASSERT(tile != tiles.end(), "a weight gradient without a kernel");
  start(key, *tile, step);
}

}  // namespace

size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts,
                                     const ScratchSizes& sizes) {
  return ExpertRanks::bytes(
      experts.E, weight_gradient_shares(step, experts, sizes, current_device().multiprocessors));
}

void weight_gradient_2(const WeightGradient2& step) {
  run_weight_gradient({.experts = step.experts,
                       .rows = step.rows,
                       .dense = step.A_scaled,
                       .dense_columns = step.experts->n,
                       .gathered = step.dO,
                       .part = {{.out = transposed(step.dW2), .dense_first = 0}},
                       .parts = 1,
                       .accumulate = step.accumulate,
                       .scratch = step.scratch,
                       .shares = 0,
                       .stream = step.stream,
                       .tuning = step.tuning},
                      step.workers);
}

void weight_gradient_1(const WeightGradient1& step) {
  const bool adjacent = has_adjacent_columns(*step.experts, step.W1);
  const UpParts parts = up_parts(*step.experts, step.dW1, step.dW1_up, adjacent);
  WeightGradient gradient{.experts = step.experts,
                          .rows = step.rows,
                          .dense = step.dH,
                          .dense_columns = parts.columns,
                          .gathered = step.X,
                          .part = {},
                          .parts = 0,
                          .accumulate = step.accumulate,
                          .scratch = step.scratch,
                          .shares = 0,
                          .stream = step.stream,
                          .tuning = step.tuning};
  for (int p = 0; p < parts.count; ++p) {
    const tilemoe_tensor& out = parts.part[p];
    if (!present(out)) continue;
    // A launch has outputs of one dtype and one major: parts that differ take one launch each.
    if (gradient.parts > 0 && output_of(gradient.part[0].out) != output_of(out)) {
      run_weight_gradient(gradient, step.workers);
      gradient.parts = 0;
    }
    gradient.part[gradient.parts++] = {.out = out, .dense_first = p * parts.columns};
  }
  run_weight_gradient(gradient, step.workers);
}

}  // namespace tilemoe::cuda
