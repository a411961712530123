// The CUDA backend, and the limits of its kernels, which are checked before anything is written or
// launched.
#include "cuda/cuda_backend.h"

#include <algorithm>

#include "core/activation_kinds.h"
#include "core/backend.h"
#include "core/check.h"
#include "cuda/arch.h"
#include "cuda/core/device.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/kernels/kernels.h"
#include "cuda/layer_gemms.h"
#include "cuda/ops/router_logits.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"
#include "cuda/weight_codes.h"

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
                          name << " has a row stride of " << bytes << " bytes, expected at most "
                               << kMaxRowStrideBytesCuda << " on CUDA");
}

void check_matrices(const char* name, const tilemoe_tensor& matrices) {
  if (!present(matrices)) return;
  const int64_t row = std::max(stride_bytes(matrices, 1), stride_bytes(matrices, 2));
  TILEMOE_CHECK_SUPPORTED(row <= kMaxRowStrideBytesCuda, name << " has a row or column stride of "
                                                              << row << " bytes, expected at most "
                                                              << kMaxRowStrideBytesCuda
                                                              << " on CUDA");
  const int64_t expert = stride_bytes(matrices, 0);
  TILEMOE_CHECK_SUPPORTED(expert <= kMaxExpertStrideBytesCuda,
                          name << " has an expert stride of " << expert
                               << " bytes, expected at most " << kMaxExpertStrideBytesCuda
                               << " on CUDA");
}

// Tiles and CTAs are counted in 31 bits. Only tensors of terabytes exceed that.
void check_count(const char* what, int64_t rows, int64_t columns, const LayerTensors& tensors) {
  TILEMOE_CHECK_SUPPORTED(columns == 0 || rows <= INT32_MAX / 2 / columns,
                          what << " of " << tensors.routing.capacity << " rows and "
                               << tensors.experts.E << " experts, d " << tensors.experts.d << ", n "
                               << tensors.experts.n << " have too many tiles to count");
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
  // Columns of P and Q, and of one adapter. Each gradient of a factor has the rank on one side.
  const int64_t columns = std::max(tensors.experts.rank_1, tensors.experts.rank_2);
  const int64_t rank = max_rank(tensors.experts);
  const int64_t widest = std::max({d, 2 * n, columns});
  const tilemoe_routing_spec& routing = tensors.routing;
  check_count("the GEMMs", routing.capacity / kMinTileRows + std::min(E, routing.capacity),
              blocks_of(widest, kMinTileColumns), tensors);
  const int64_t gathered = std::max(d, rank);
  const ReferenceTiles of_parts = ReferenceTiles::of(gathered, n, 2),
                       of_both = ReferenceTiles::of(gathered, 2 * n, 1);
  const int32_t n_blocks = std::max(of_parts.n_blocks, of_both.n_blocks);
  check_count("the weight gradients", E, int64_t{of_parts.m_blocks} * n_blocks, tensors);
  check_count("the bias gradients", E, blocks_of(widest, kBiasColumns), tensors);
  check_count("the combine", std::max(routing.T, routing.capacity), blocks_of(d, kCombineColumns),
              tensors);
}

namespace {

std::string description() {
  const DeviceInfo& device = current_device();
  Text text;
  text << "cuda: " << device.name << ", compute capability " << device.capability() << ", "
       << device.sms << " SMs";
  try {
    text << ", arch " << describe_arch_of(device);
  } catch (const Error&) {  // which tilemoe_cuda_arch() reports
    text << ", no arch: only routing and the router run, not the layer";
  }
  return text.str();
}

// The plan of a call checks the same.
void check_supported(const tilemoe_experts& experts) {
  arch_of(current_device());
  check_dtype(experts);
}

KernelPlan plan(const PlanRequest& request) {
  if (tilemoe::is_fp8(request.experts)) {
    const DeviceInfo& device = current_device();
    TILEMOE_CHECK_SUPPORTED(arch_of(device) == ArchName::kSm90,
                            "the fp8 recipe needs the arch sm90, for its FP8 wgmma; this GPU of "
                            "compute capability "
                                << device.capability() << " has " << describe_arch_of(device));
  }
  return plan_for(request);
}

// Those with SwiGLU's own kernels: the epilogues of all gated activations would spill.
bool writes_dH_codes(const tilemoe_experts& experts) {
  const KernelKey of_swiglu{GemmName::kActivationGradient,
                            ArchName::kSm90,
                            {.recipe = recipe_of(experts, /*fp8=*/true),
                             .weights = Major::kK,
                             .activations = Activations::kSwiGLU,
                             .codes = true}};
  return is_fp8_backward(experts) && is_plain_swiglu(experts) && !tiles_of(of_swiglu).empty();
}

KernelPlan plan_without_device(const tilemoe_experts& experts, int sms, const char* arch) {
  check_dtype(experts);
  struct Sized {
    DeviceInfo device{};
    ExpertsPlan plan{};
  };
  const auto sized = std::make_shared<Sized>();
  sized->device.sms = sms;
  sized->plan = {.device = &sized->device, .arch = built_arch(arch)};
  return {sized, &sized->plan};
}

// Without an arch router_logits runs, as routing does.
bool has_wgmma() {
  try {
    return arch_of(current_device()) == ArchName::kSm90;
  } catch (const Error&) {
    return false;
  }
}
void router_logits(const tilemoe_router_logits_args& args) {
  cuda::router_logits(args, has_wgmma);
}

void quantize_fp8(const tilemoe_quantize_fp8_args& args) {
  cuda::quantize_fp8(args, nullptr);
}
void quantize_rows(const QuantizeRows& step) {
  cuda::quantize_fp8(step.arguments(), step.end);
}

size_t projection_scratch_bytes(const tilemoe_experts&, const ScratchSizes&) {
  return 0;
}

size_t routing_scratch_bytes(const tilemoe_routing_spec& spec) {
  switch (spec.kind) {
    case TILEMOE_ROUTING_TOP_K:
    case TILEMOE_ROUTING_GENERAL: return pair_scratch_bytes(spec);
    case TILEMOE_ROUTING_ROUNDED:
      return std::max(round_scratch_bytes(spec), router_backward_scratch_bytes(spec));
    case TILEMOE_ROUTING_GROUPED: break;
  }
  return 0;
}

constexpr Backend kBackend = {
    .description = description,
    .check_supported = check_supported,
    .check_limits = check_call_limits,
    .plan = plan,
    .reads_codes = codes_read,
    .writes_dH_codes = writes_dH_codes,
    .plan_without_device = plan_without_device,
#define STEP(ARGS, NAME, RUN, SCRATCH_BYTES) {#NAME, SCRATCH_BYTES, RUN},
    .steps =
        {
#include "core/backend.inc"
        },
#define FUNCTION(RESULT, NAME, ARGUMENTS) .NAME = NAME,
#include "core/backend.inc"
};

}  // namespace

const Backend& backend_of_build() {
  return kBackend;
}

const Backend& backend() {
  // Once: each call reads the current device itself.
  static const DeviceInfo& first = current_device();
  static_cast<void>(first);
  return kBackend;
}

}  // namespace tilemoe::cuda
