// The steps with kernels of this folder, as the backend calls them: routing, then the layer.
#pragma once

#include "core/step_arguments.h"
#include "cuda/core/device.h"

namespace tilemoe::cuda {

void top_k(const tilemoe_top_k_args& args);
void top_k(const DeviceInfo& device, const tilemoe_top_k_args& args);
void top_k_scores(const tilemoe_top_k_scores_args& args);
void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args);
void route_general(const tilemoe_routing& routing, const tilemoe_route_general_args& args);
void route_grouped(const tilemoe_routing& routing, const tilemoe_route_grouped_args& args);

// Scratch of a routing from pairs, top-K or general.
size_t pair_scratch_bytes(const tilemoe_routing_spec& spec);

void route_tokens(const tilemoe_routing& routing, const tilemoe_route_tokens_args& args);
size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t d);

// A float32 weight (E, d) as bfloat16 (E, blocks of 64 columns, terms, 64), zeros past d.
constexpr int kWeightTerms = 3;
constexpr int64_t kTermColumns = 64;
void split_weight(const tilemoe_tensor& weight, void* terms, cudaStream_t stream);

void route_rounded(const tilemoe_routing& routing, const tilemoe_route_rounded_args& args);
size_t round_scratch_bytes(const tilemoe_routing_spec& spec);

void router_backward(const tilemoe_router_backward_args& args);
size_t router_backward_scratch_bytes(const tilemoe_routing_spec& spec);

void router_losses(const tilemoe_router_losses_args& args);
size_t router_losses_scratch_bytes(int64_t T, int64_t E);

// The steps of the layer without a GEMM, and the sums of rows of several arrays.

void combine(const Combine& step);
void score_gradient(const ScoreGradient& step);
void bias_gradient(const BiasGradient& step);
size_t bias_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);
void sum_rows(const tilemoe_sum_rows_args& args);
// Sets the rows of `out` (capacity, columns) after the last expert's to zero.
void clear_rest(const Rows& rows, const tilemoe_tensor& out, void* stream);

// Quantised weights.

void dequantize(const Dequantize& step);
// end: in device memory; with blocks of one row, only the rows before *end. Null: all rows.
void quantize_fp8(const tilemoe_quantize_fp8_args& args, const int32_t* end);

// Low-rank adapters.

void pack_lora(const tilemoe_experts& experts, const LoraPacking& packing, void* stream);

// The experts' rows, times scale and score, rounded. Rows past the last expert's are not read.
struct ScaledRows {
  const Rows& rows;
  tilemoe_tensor from;  // (capacity, columns): a multiple of 8 columns
  float scale;
  const float* score;  // (capacity); null: 1
  tilemoe_tensor to;   // out, as `from`
  const DeviceInfo& device;
  void* stream;
};
void scale_rows(const ScaledRows& scaled);

// Q and the gradient of B by one read of dO or dH, for small ranks. With small M the sums of dB
// take longer than the second read.
bool has_output_gradient(int64_t capacity, int64_t E, int64_t rank);
void lora_output_gradient(const LoraProjection& step, const DeviceInfo& device);
size_t lora_output_gradient_scratch_bytes(int64_t capacity, int64_t E, int64_t width, int64_t rank,
                                          const DeviceInfo& device);

}  // namespace tilemoe::cuda
