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

ArchName arch() {
  return arch_of(current_device());
}
DeviceModel model(ArchName arch) {
  const int sms = current_device().sms;
  switch (arch) {
    case ArchName::kSm80: return mma_sync_model(sms);
    case ArchName::kSm90: return hopper_model(sms);
    case ArchName::kSm100: return blackwell_model(sms);
  }
  TILEMOE_ASSERT(false, "arch " << static_cast<int>(arch) << " has no cost model");
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

// The first key if it has kernels.
KernelKey either(const KernelKey& special, const KernelKey& general) {
  return Tiles(special).empty() ? general : special;
}

// Tiles that the model chooses among. The model does not choose 2-CTA MMA on 10.x,
// where nothing is measured.
std::span<const TileConfiguration> offered(const Tiles& tiles, ArchName arch) {
  const std::span<const TileConfiguration> all(tiles.data(), tiles.size());
  if (arch != ArchName::kSm100) return all;
  const int cluster = sm100::requests_2cta() ? 2 : 1;
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const auto& tile) { return tile.cluster == cluster; });
  return found == all.end() ? all : std::span(found, 1);
}

template <class Step>
TileConfiguration choose(const Step& step, const KernelKey& key) {
  const Tiles tiles(key);
  TILEMOE_ASSERT(!tiles.empty(), "a step without a kernel");
  const TileConfiguration* const requested = step.tuning.tile;
  if (requested != nullptr && std::find(tiles.begin(), tiles.end(), *requested) != tiles.end())
    return *requested;
  return choose_tile(size_of(step), offered(tiles, key.arch), model(key.arch));
}

template <class Step>
void run(const Step& step) {
  const KernelKey key = key_of(step);
  start(key, choose(step, key), step);
}

}  // namespace

KernelKey key_of(const UpProjection& step) {
  const tilemoe_experts& experts = *step.experts;
  const tilemoe_tensor& W1 = step.weights.W1;
  Variant general{.recipe = recipe_of(experts),
                  .weights = major_of(W1),
                  .activations = activations_of(experts),
                  .interleaved_columns = has_interleaved_columns(experts, W1)};
  Variant special = general;
  special.activations = Activations::kSwiGLU;
  special.gathers = step.rows.token != nullptr;
  const KernelKey key{GemmName::kUpProjection, arch(), general};
  return is_plain_swiglu(experts) ? either({key.gemm, key.arch, special}, key) : key;
}

KernelKey key_of(const DownProjection& step) {
  return {GemmName::kDownProjection,
          arch(),
          {.recipe = recipe_of(*step.experts), .weights = major_of(step.W2)}};
}

KernelKey key_of(const ActivationGradient& step) {
  const tilemoe_experts& experts = *step.experts;
  Variant general{.recipe = recipe_of(experts),
                  .weights = major_of_transpose(step.W2),
                  .activations = activations_of(experts)};
  Variant special = general;
  special.activations = Activations::kSwiGLU;
  const KernelKey key{GemmName::kActivationGradient, arch(), general};
  const bool plain = is_plain_swiglu(experts) && !has_interleaved_columns(experts, step.W1);
  return plain ? either({key.gemm, key.arch, special}, key) : key;
}

KernelKey key_of(const InputGradient& step) {
  return {GemmName::kInputGradient,
          arch(),
          {.recipe = recipe_of(*step.experts), .weights = major_of_transpose(step.weights.W1)}};
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

// The properties of the output that a weight gradient kernel is compiled for.
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
  step.splits = weight_gradient_splits({.dense_columns = step.dense_columns,
                                        .parts = step.parts,
                                        .d = step.gathered.shape[1],
                                        .capacity = step.rows.capacity,
                                        .of_an_expert = step.rows.of_an_expert},
                                       workers_of(workers, current_device().sms));
  const GradientOutput out = output_of(step.part[0].out);
  for (int p = 1; p < step.parts; ++p)
    TILEMOE_ASSERT(output_of(step.part[p].out) == out,
                   "a weight gradient's parts differ in dtype or major");
  const KernelKey key{
      GemmName::kWeightGradient,
      arch(),
      {.recipe = recipe_of(*step.experts), .float_out = out.is_float32, .out = out.major}};
  const Tiles tiles(key);
  // The tile of a CTA is half of a reference tile.
  const auto* const tile = std::find_if(tiles.begin(), tiles.end(), [&](const auto& each) {
    return each.block_n == column_block(step.dense_columns);
  });
  TILEMOE_ASSERT(tile != tiles.end(), "a weight gradient without a kernel");
  start(key, *tile, step);
}

}  // namespace

size_t weight_gradient_scratch_bytes(Step step, const tilemoe_experts& experts,
                                     const ScratchSizes& sizes) {
  return ExpertRanks::bytes(experts.E,
                            weight_gradient_splits(step, experts, sizes, current_device().sms));
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
                       .splits = 0,
                       .stream = step.stream,
                       .tuning = step.tuning},
                      step.workers);
}

void weight_gradient_1(const WeightGradient1& step) {
  const bool interleaved_columns = has_interleaved_columns(*step.experts, step.W1);
  const UpParts parts = up_parts(*step.experts, step.dW1, step.dW1_up, interleaved_columns);
  WeightGradient gradient{.experts = step.experts,
                          .rows = step.rows,
                          .dense = step.dH,
                          .dense_columns = parts.columns,
                          .gathered = step.X,
                          .part = {},
                          .parts = 0,
                          .accumulate = step.accumulate,
                          .scratch = step.scratch,
                          .splits = 0,
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
