#include "cuda/plan.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <mutex>
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

ArchName arch_of(const ExpertsPlan* plan) {
  return plan ? plan->arch : arch_of(current_device());
}

// ---- the kernel of a step

namespace {

DeviceModel model_of(ArchName arch, const DeviceInfo& device) {
  switch (arch) {
    case ArchName::kSm80: return mma_sync_model(device.sms);
    case ArchName::kSm90: return hopper_model(device.sms, device.memory_bytes_per_s);
    case ArchName::kSm100: return blackwell_model(device.sms);
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
  return tiles_of(special).empty() ? general : special;
}

bool requests_2cta() {
  static const bool requested = sm100::requests_2cta(std::getenv("TILEMOE_2CTA"));  // read once
  return requested;
}

// Tiles that the model chooses among. The model does not choose 2-CTA MMA on 10.x, where nothing is
// measured.
std::span<const TileConfiguration> offered(std::span<const TileConfiguration> all, ArchName arch) {
  if (arch != ArchName::kSm100) return all;
  const int cluster = requests_2cta() ? 2 : 1;
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const auto& tile) { return tile.cluster == cluster; });
  return found == all.end() ? all : std::span(found, 1);
}

template <class Step>
Kernel choose(const Step& step) {
  const KernelKey key = key_of(step);
  const std::span<const TileConfiguration> tiles = tiles_of(key);
  TILEMOE_ASSERT(!tiles.empty(), "a step without a kernel");
  if (const TileConfiguration* const requested = step.tuning.tile) {
    const auto found = std::find(tiles.begin(), tiles.end(), *requested);
    if (found != tiles.end()) return &*found;
  }
  ProjectionSize size = size_of(step);
  if (is_fp8(key.variant.recipe)) size.sum /= 2;  // the same bytes and MMAs, in 16 bits
  const DeviceModel model = model_of(key.arch, device_of(step.tuning.plan));
  return &choose_tile(size, offered(tiles, key.arch), model);
}

// The planned kernel of the step's columns, unless the step requests a tile: the last block of
// columns may be narrower than those of the plan.
template <class Step>
Kernel planned_or_chosen(const Step& step, std::span<const ProjectionPlan> planned) {
  const int64_t columns = size_of(step).columns;
  if (step.tuning.tile == nullptr)
    for (const ProjectionPlan& one : planned)
      if (one.kernel != nullptr && one.columns == columns) return one.kernel;
  return choose(step);
}

template <class Step>
Kernel planned_or_chosen(const Step& step, ProjectionPlan ExpertsPlan::*planned) {
  if (step.tuning.plan == nullptr) return choose(step);
  return planned_or_chosen(step, std::span(&(step.tuning.plan->*planned), 1));
}

}  // namespace

KernelKey key_of(const UpProjection& step) {
  const tilemoe_experts& experts = *step.experts;
  Variant general{.recipe = recipe_of(experts, step.A_codes.given()),
                  .weights = major_of(step.weights.W1),
                  .activations = activations_of(experts),
                  .interleaved_columns = has_interleaved_columns(experts, step.weights.W1),
                  .adapter = present(step.adapter.rows) || writes_A_twice(step),
                  .codes = step.codes.given() || step.A_codes.given()};
  const bool plain = is_plain_swiglu(experts) && !general.interleaved_columns;
  Variant special = general;
  special.activations = plain ? Activations::kSwiGLU : Activations::kClampedSwiGLU;
  special.gathers = !plain || step.rows.token != nullptr || general.adapter;
  const KernelKey key{GemmName::kUpProjection, arch_of(step.tuning.plan), general};
  return experts.activation == TILEMOE_SWIGLU ? either({key.gemm, key.arch, special}, key) : key;
}

KernelKey key_of(const DownProjection& step) {
  return {GemmName::kDownProjection,
          arch_of(step.tuning.plan),
          {.recipe = recipe_of(*step.experts, step.A_codes.given()),
           .weights = major_of(step.W2),
           .adapter = present(step.adapter.rows),
           .codes = step.codes.given() || step.A_codes.given()}};
}

KernelKey key_of(const ActivationGradient& step) {
  const tilemoe_experts& experts = *step.experts;
  const bool fp8 = step.dO_codes.given();
  Variant general{.recipe = recipe_of(experts, fp8),
                  .weights = fp8 ? Major::kK : major_of_transpose(step.W2),
                  .activations = activations_of(experts),
                  .adapter = present(step.adapter.rows),
                  .codes = fp8};
  Variant special = general;
  special.activations = Activations::kSwiGLU;
  const KernelKey key{GemmName::kActivationGradient, arch_of(step.tuning.plan), general};
  const bool plain = is_plain_swiglu(experts) && !has_interleaved_columns(experts, step.W1);
  return plain ? either({key.gemm, key.arch, special}, key) : key;
}

KernelKey key_of(const InputGradient& step) {
  const bool fp8 = step.dH_codes.given();
  return {GemmName::kInputGradient,
          arch_of(step.tuning.plan),
          {.recipe = recipe_of(*step.experts, fp8),
           .weights = fp8 ? Major::kK : major_of_transpose(step.weights.W1),
           .adapter = present(step.adapter.rows),
           .codes = fp8}};
}

// A plan has the kernels of the call's recipe; those that read codes for 16-bit MMAs have one tile.
Kernel kernel_of(const UpProjection& step) {
  if (step.codes.given() && !step.A_codes.given()) return choose(step);
  return planned_or_chosen(step, &ExpertsPlan::up_projection);
}
Kernel kernel_of(const DownProjection& step) {
  if (step.codes.given() && !step.A_codes.given()) return choose(step);
  return planned_or_chosen(step, &ExpertsPlan::down_projection);
}
Kernel kernel_of(const ActivationGradient& step) {
  return planned_or_chosen(step, &ExpertsPlan::activation_gradient);
}
Kernel kernel_of(const InputGradient& step) {
  if (step.tuning.plan == nullptr) return choose(step);
  return planned_or_chosen(step, step.tuning.plan->input_gradient);
}

// ---- weight gradients and low-rank adapters

KernelKey key_of(const WeightGradient& step) {
  const tilemoe_tensor& out = step.part[0].out;
  return {GemmName::kWeightGradient,
          arch_of(step.tuning.plan),
          {.recipe = recipe_of(*step.experts),
           .float_out = out.dtype == TILEMOE_FLOAT32,
           .out = out.stride[2] == 1 ? OutputMajor::kColumn : OutputMajor::kRow}};
}

Kernel kernel_of(const WeightGradient& step) {
  const std::span<const TileConfiguration> tiles = tiles_of(key_of(step));
  // The tile of a CTA is half of a reference tile. A factor may take only the narrow part of it:
  // the columns of that half that exist. Weight gradients keep the wide one, however few they have.
  const bool is_narrow = step.of_factor && step.dense_columns <= kNarrowColumns;
  const int block = is_narrow ? kNarrowColumns : column_block(step.dense_columns);
  const bool is_long = !step.of_factor && step.rows.capacity >= kWholeTileRows * step.rows.E;
  const Kernel tile = choose_gradient_tile(tiles, block, is_long, step.tuning.tile);
  TILEMOE_ASSERT(tile != nullptr, "a weight gradient without a kernel");
  return tile;
}

KernelKey key_of(const LoraProjection& step) {
  return {GemmName::kLoraProjection,
          arch_of(step.tuning.plan),
          {.recipe = recipe_of(*step.experts),
           .weights = major_of(step.factor),
           .gathers = step.rows.token != nullptr}};
}

Kernel kernel_of(const LoraProjection& step) {
  const std::span<const TileConfiguration> tiles = tiles_of(key_of(step));
  TILEMOE_ASSERT(tiles.size() == 1, tiles.size() << " kernels of a projection of adapters");
  return tiles.data();
}

// ---- the plan of a call

void check_dtype(const tilemoe_experts& experts) {
  TILEMOE_CHECK_SUPPORTED(is_16bit(experts.dtype), "experts.dtype is "
                                                       << tilemoe_dtype_name(experts.dtype)
                                                       << ", expected bfloat16 or float16 on CUDA");
}

namespace {

// Everything that a plan depends on.
struct PlanKey {
  int device;
  uint32_t arch_requests;  // a request for another arch makes new plans
  int64_t E, d, n, capacity, Y_columns, dX_columns, dX_columns_over_H;
  int32_t rank_1, rank_2;
  tilemoe_dtype dtype;
  tilemoe_activation activation;
  tilemoe_gate_layout gate_layout;
  Major W1, W2;
  tilemoe_recipe recipe;
  bool plain_swiglu, gathers;
  bool operator==(const PlanKey&) const = default;

  size_t hash() const {
    size_t mixed = 0;
    for (const int64_t number :
         {int64_t{device}, int64_t{arch_requests}, E, d, n, capacity, Y_columns, dX_columns,
          int64_t{rank_1}, int64_t{rank_2}, int64_t{dtype}, int64_t{activation}})
      mixed = (mixed ^ static_cast<size_t>(number)) * 0x9e3779b97f4a7c15;
    return mixed >> 32;
  }
};

PlanKey key_of(const PlanRequest& request, const DeviceInfo& device) {
  const tilemoe_experts& experts = request.experts;
  return {.device = device.index,
          .arch_requests = arch_requests(),
          .E = experts.E,
          .d = experts.d,
          .n = experts.n,
          .capacity = request.rows.capacity,
          .Y_columns = request.Y_columns,
          .dX_columns = request.dX_columns,
          .dX_columns_over_H = request.dX_columns_over_H,
          .rank_1 = experts.rank_1,
          .rank_2 = experts.rank_2,
          .dtype = experts.dtype,
          .activation = experts.activation,
          .gate_layout = experts.gate_layout,
          .W1 = major_of(request.weights.W1),
          .W2 = major_of(request.weights.W2),
          .recipe = experts.recipe,
          .plain_swiglu = is_plain_swiglu(experts),
          .gathers = request.rows.token != nullptr};
}

// The kernels of steps of the request's sizes and layouts.
ExpertsPlan make_plan(const PlanRequest& request, const DeviceInfo& device) {
  check_dtype(request.experts);
  ExpertsPlan plan{.device = &device, .arch = arch_of(device)};
  if (plan.arch == ArchName::kSm80) sm80::shared_bytes_of_block(device);  // or its error
  const UpWeights weights{request.weights.W1, request.weights.W1_up, {}, {}};
  // A step with what its kernel depends on.
  const auto step_of = [&](auto step) {
    step.experts = &request.experts;
    step.rows = request.rows;
    step.tuning.plan = &plan;
    return step;
  };
  // As far as a kernel depends on it: whether there is one.
  const auto adapter_of = [](int32_t rank) {
    Adapter adapter{};
    if (rank > 0) adapter.rows.ndim = 2;
    return adapter;
  };
  static uint8_t any_code;
  uint8_t* const forward_codes = tilemoe::is_fp8(request.experts) ? &any_code : nullptr;
  uint8_t* const backward_codes = is_fp8_backward(request.experts) ? &any_code : nullptr;
  const auto planned = [](const auto& step) {
    return ProjectionPlan{choose(step), size_of(step).columns};
  };

  auto up = step_of(UpProjection{});
  up.weights = weights, up.A = adapter_of(request.experts.rank_2).rows;
  up.adapter = adapter_of(request.experts.rank_1), up.A_codes.codes = forward_codes;
  plan.up_projection = planned(up);

  auto down = step_of(DownProjection{});
  down.W2 = request.weights.W2, down.Y.shape[1] = request.Y_columns;
  down.adapter = adapter_of(request.experts.rank_2), down.A_codes.codes = forward_codes;
  plan.down_projection = planned(down);

  auto activation = step_of(ActivationGradient{});
  activation.W1 = weights.W1, activation.W2 = request.weights.W2;
  activation.adapter = adapter_of(request.experts.rank_2);
  activation.dO_codes.codes = backward_codes;
  plan.activation_gradient = planned(activation);

  auto input = step_of(InputGradient{});
  input.weights = weights, input.dH.shape[1] = plan.up_projection.columns;
  input.adapter = adapter_of(request.experts.rank_1), input.dH_codes.codes = backward_codes;
  input.dX_rows.shape[1] = request.dX_columns, plan.input_gradient[0] = planned(input);
  input.dX_rows.shape[1] = request.dX_columns_over_H, plan.input_gradient[1] = planned(input);
  return plan;
}

// The plans of the process. A key has one place, where the newest plan replaces an older one, so that
// a server whose batches differ in size needs no more memory over time.
class Plans {
 public:
  std::shared_ptr<const ExpertsPlan> get(const PlanRequest& request) {
    const DeviceInfo& device = current_device();
    const PlanKey key = key_of(request, device);
    const size_t place = key.hash() % kPlaces;
    {
      const std::lock_guard lock(mutex_);
      const std::shared_ptr<const Entry>& known = entries_[place];
      if (known != nullptr && known->key == key) return {known, &known->plan};
    }
    const auto made = std::make_shared<const Entry>(Entry{key, make_plan(request, device)});
    const std::lock_guard lock(mutex_);
    entries_[place] = made;
    return {made, &made->plan};
  }

 private:
  struct Entry {
    PlanKey key;
    ExpertsPlan plan;
  };
  static constexpr size_t kPlaces = 256;
  std::mutex mutex_;
  std::array<std::shared_ptr<const Entry>, kPlaces> entries_;
};

}  // namespace

std::shared_ptr<const ExpertsPlan> plan_for(const PlanRequest& request) {
  static Plans& plans = *new Plans;  // never destroyed: at exit() other threads may still compute
  return plans.get(request);
}

}  // namespace tilemoe::cuda
