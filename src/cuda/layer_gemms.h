// The steps of the layer that are GEMMs, as the backend runs them.
#pragma once

#include "core/backend.h"

namespace tilemoe::cuda {

void up_projection(const UpProjection& step);
void down_projection(const DownProjection& step);
void activation_gradient(const ActivationGradient& step);
void weight_gradient_2(const WeightGradient2& step);
void input_gradient(const InputGradient& step);
void weight_gradient_1(const WeightGradient1& step);
void lora_projection(const LoraProjection& step);
void lora_gradient(const LoraGradient& step);
size_t weight_gradient_1_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);
size_t weight_gradient_2_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);
size_t lora_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);
size_t lora_Q_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);

}  // namespace tilemoe::cuda
