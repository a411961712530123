// The CUDA backend, and the limits of its kernels, which are checked before anything is written or
// launched.
#include "cuda/cuda_backend.h"

#include <algorithm>
#include <sstream>

#include "core/backend.h"
#include "core/check.h"
#include "cuda/arch.h"
#include "cuda/choose_kernel.h"
#include "cuda/core/device.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/kernels/kernels.h"
#include "cuda/two_cta.h"

namespace tilemoe::cuda {

namespace {

using namespace limits;

// No stride counts along a dimension of size 1.
int64_t stride_bytes(const tilemoe_tensor& tensor, int dimension) {
  if (tensor.shape[dimension] <= 1) return 0;
  return tensor.stride[dimension] * static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype));
}

void check_rows(const char* name, const tilemoe_tensor& rows) {
  if (!present(rows)) return;
  const int64_t bytes = stride_bytes(rows, 0);
  TILEMOE_CHECK_SUPPORTED(bytes <= kMaxRowStrideBytesCuda,
                          name << " has rows " << bytes << " bytes apart, the CUDA backend takes "
                               << kMaxRowStrideBytesCuda);
}

void check_matrices(const char* name, const tilemoe_tensor& matrices) {
  if (!present(matrices)) return;
  const int64_t row = std::max(stride_bytes(matrices, 1), stride_bytes(matrices, 2));
  TILEMOE_CHECK_SUPPORTED(row <= kMaxRowStrideBytesCuda,
                          name << " has rows or columns " << row
                               << " bytes apart, the CUDA backend takes "
                               << kMaxRowStrideBytesCuda);
  const int64_t expert = stride_bytes(matrices, 0);
  TILEMOE_CHECK_SUPPORTED(expert <= kMaxExpertStrideBytesCuda,
                          name << " has experts " << expert
                               << " bytes apart, the CUDA backend takes "
                               << kMaxExpertStrideBytesCuda);
}

// Tiles and CTAs are counted in 31 bits. Only tensors of terabytes exceed that.
void check_count(const char* what, int64_t rows, int64_t columns, const LayerTensors& tensors) {
  TILEMOE_CHECK_SUPPORTED(columns == 0 || rows <= INT32_MAX / 2 / columns,
                          what << " of " << tensors.routing.capacity << " rows and "
                               << tensors.experts.E << " experts, d " << tensors.experts.d << ", n "
                               << tensors.experts.n << ": too many tiles to count");
}

int64_t blocks_of(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

// The smallest tile that any kernel has, and columns of a bias gradient's and a combine's CTA.
constexpr int64_t kMinTileRows = 16, kMinTileColumns = 64;
constexpr int64_t kBiasColumns = 128, kCombineColumns = 8 * 256;

}  // namespace

void check_call_limits(const LayerTensors& tensors) {
  check_rows("X", tensors.X);
  check_rows("dO", tensors.dO);
  check_matrices("weights.W1", tensors.weights.W1);
  check_matrices("weights.W1_up", tensors.weights.W1_up);
  check_matrices("weights.W2", tensors.weights.W2);
  check_matrices("dweights.W1", tensors.gradients.W1);
  check_matrices("dweights.W1_up", tensors.gradients.W1_up);
  check_matrices("dweights.W2", tensors.gradients.W2);

  const int64_t E = tensors.experts.E, d = tensors.experts.d, n = tensors.experts.n;
  const int64_t widest = std::max(d, 2 * n);
  const tilemoe_routing_spec& routing = tensors.routing;
  check_count("the GEMMs", routing.capacity / kMinTileRows + std::min(E, routing.capacity),
              blocks_of(widest, kMinTileColumns), tensors);
  const ReferenceTiles of_parts = ReferenceTiles::of(d, n, 2),
                       of_both = ReferenceTiles::of(d, 2 * n, 1);
  const int32_t n_blocks = std::max(of_parts.n_blocks, of_both.n_blocks);
  check_count("the weight gradients", E, int64_t{of_parts.m_blocks} * n_blocks, tensors);
  check_count("the bias gradients", E, blocks_of(widest, kBiasColumns), tensors);
  check_count("the combine", std::max(routing.T, routing.capacity), blocks_of(d, kCombineColumns),
              tensors);
}

namespace {

class CudaBackend final : public Backend {
 public:
  std::string description() const override {
    const DeviceInfo& device = current_device();
    std::ostringstream text;
    text << "cuda: " << device.name << ", compute capability " << device.capability() << ", "
         << device.sms << " SMs";
    try {
      text << ", arch " << describe_arch_of(device);
    } catch (const Error&) {  // which tilemoe_cuda_arch() reports
      text << ", no arch: routing and the router alone, not the layer";
    }
    return text.str();
  }

  void check_supported(const tilemoe_experts& experts) const override {
    // Or its error, before anything is written or launched.
    if (arch_of(current_device()) == ArchName::kSm100) sm100::requests_2cta();
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
