// The CPU backend: it runs on any machine, and is the reference in tests of other backends. It has
// one file per step, which defines the tasks of the step.
#pragma once

#include "core/backend.h"

namespace tilemoe::cpu {

// The backend. The first call starts the threads, so that no step does. Throws Error(kUnsupported)
// in a build without it (cpu/absent.cpp).
const Backend& backend();

void up_projection(const UpProjection& step);
void down_projection(const DownProjection& step);
void combine(const Combine& step);
void activation_gradient(const ActivationGradient& step);
void score_gradient(const ScoreGradient& step);
void weight_gradient_2(const WeightGradient2& step);
void input_gradient(const InputGradient& step);
void weight_gradient_1(const WeightGradient1& step);
void bias_gradient(const BiasGradient& step);
void dequantize(const Dequantize& step);
void quantize_rows(const QuantizeRows& step);
void lora_projection(const LoraProjection& step);
void lora_gradient(const LoraGradient& step);
size_t lora_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);
size_t lora_Q_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes);

#define FUNCTION(RESULT, NAME, ARGUMENTS) RESULT NAME ARGUMENTS;
#include "core/backend.inc"

}  // namespace tilemoe::cpu
