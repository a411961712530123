#include "cuda/backend.h"

#include <algorithm>
#include <sstream>

#include "check.h"
#include "cuda/call_limits.h"
#include "cuda/core/device.h"
#include "cuda/kit_choice.h"
#include "cuda/products.h"
#include "cuda/rowwise/routing.h"
#include "cuda/rowwise/steps.h"
#include "cuda/sm100/pairs.h"

namespace tilemoe::cuda {
namespace {

class CudaBackend final : public Backend {
 public:
  std::string description() const override {
    const DeviceInfo& device = current_device();
    std::ostringstream text;
    text << "cuda: " << device.name << ", compute capability " << device.capability() << ", "
         << device.multiprocessors << " multiprocessors";
    try {
      text << ", arch " << describe_kit_of(device);
    } catch (const Error&) {  // which tilemoe_cuda_kit() tells
      text << ", no arch: routing and the router alone, not the layer";
    }
    return text.str();
  }

  void check_supported(const tilemoe_experts& experts) const override {
    // Or its error, before anything is written or launched.
    if (kit_of(current_device()) == KitName::kSm100) sm100::pairs_asked_for();
    TILEMOE_CHECK_SUPPORTED(is_16bit(experts.dtype),
                            "experts.dtype is " << tilemoe_dtype_name(experts.dtype)
                                                << ", the CUDA backend takes bfloat16 and float16");
  }

  void check_limits(const LayerTensors& tensors) const override {
    cuda::check_call_limits(tensors);
  }

  size_t scratch_bytes(Step step, const tilemoe_experts& experts,
                       const ScratchSizes& sizes) const override {
    switch (step) {
      case Step::kWeightGradient1:
      case Step::kWeightGradient2: return weight_gradient_scratch_bytes(step, experts, sizes);
      case Step::kBiasGradient: return bias_gradient_scratch_bytes(experts, sizes.capacity);
      default: return 0;
    }
  }

  void up_projection(const UpProjection& step) override { cuda::up_projection(step); }
  void down_projection(const DownProjection& step) override { cuda::down_projection(step); }
  void combine(const Combine& step) override { cuda::combine(step); }
  void activation_gradient(const ActivationGradient& step) override {
    cuda::activation_gradient(step);
  }
  void score_gradient(const ScoreGradient& step) override { cuda::score_gradient(step); }
  void weight_gradient_2(const WeightGradient2& step) override { cuda::weight_gradient_2(step); }
  void input_gradient(const InputGradient& step) override { cuda::input_gradient(step); }
  void weight_gradient_1(const WeightGradient1& step) override { cuda::weight_gradient_1(step); }
  void bias_gradient(const BiasGradient& step) override { cuda::bias_gradient(step); }

  size_t routing_scratch_bytes(const tilemoe_routing_spec& spec) const override {
    switch (spec.kind) {
      case TILEMOE_ROUTING_TOP_K:
      case TILEMOE_ROUTING_GENERAL: return pair_scratch_bytes(spec);
      case TILEMOE_ROUTING_ROUNDED:
        return std::max(round_scratch_bytes(spec), router_backward_scratch_bytes(spec));
      case TILEMOE_ROUTING_GROUPED: break;
    }
    return 0;
  }
  size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t d) const override {
    return cuda::route_tokens_scratch_bytes(spec, d);
  }
  size_t router_losses_scratch_bytes(int64_t T, int64_t E) const override {
    return cuda::router_losses_scratch_bytes(T, E);
  }
  void top_k(const tilemoe_top_k_args& args) override { cuda::top_k(args); }
  void top_k_scores(const tilemoe_top_k_scores_args& args) override { cuda::top_k_scores(args); }
  void route_top_k(tilemoe_routing& routing, const tilemoe_route_top_k_args& args) override {
    cuda::route_top_k(routing, args);
  }
  void route_tokens(tilemoe_routing& routing, const tilemoe_route_tokens_args& args) override {
    cuda::route_tokens(routing, args);
  }
  void route_general(tilemoe_routing& routing, const tilemoe_route_general_args& args) override {
    cuda::route_general(routing, args);
  }
  void route_rounded(tilemoe_routing& routing, const tilemoe_route_rounded_args& args) override {
    cuda::route_rounded(routing, args);
  }
  void route_grouped(tilemoe_routing& routing, const tilemoe_route_grouped_args& args) override {
    cuda::route_grouped(routing, args);
  }
  void router_backward(const tilemoe_router_backward_args& args) override {
    cuda::router_backward(args);
  }
  void router_losses(const tilemoe_router_losses_args& args) override { cuda::router_losses(args); }

  void sum_rows(const tilemoe_sum_rows_args& args) override { cuda::sum_rows(args); }
};

}  // namespace

Backend& backend() {
  static CudaBackend instance;
  current_device();
  return instance;
}

}  // namespace tilemoe::cuda
