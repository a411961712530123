#include "cuda/layer_gemms.h"

#include <algorithm>

#include "core/check.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/kernels/kernels.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"

namespace tilemoe::cuda {

void up_projection(const UpProjection& step) {
  start(kernel_of(step), step);
}
void down_projection(const DownProjection& step) {
  start(kernel_of(step), step);
}
void activation_gradient(const ActivationGradient& step) {
  start(kernel_of(step), step);
}
void input_gradient(const InputGradient& step) {
  start(kernel_of(step), step);
}

namespace {

// Whether one kernel computes both outputs.
bool same_kind(const tilemoe_tensor& a, const tilemoe_tensor& b) {
  return (a.dtype == TILEMOE_FLOAT32) == (b.dtype == TILEMOE_FLOAT32) &&
         (a.stride[2] == 1) == (b.stride[2] == 1);
}

void run_weight_gradient(WeightGradient step, int32_t workers) {
  if (step.parts == 0) return;
  step.splits = weight_gradient_splits({.dense_columns = step.dense_columns,
                                        .parts = step.parts,
                                        .d = step.gathered.shape[1],
                                        .capacity = step.rows.capacity,
                                        .of_an_expert = step.rows.of_an_expert},
                                       workers_of(workers, device_of(step.tuning.plan).sms));
  for (int p = 1; p < step.parts; ++p)
    TILEMOE_ASSERT(same_kind(step.part[p].out, step.part[0].out),
                   "a weight gradient's parts differ in dtype or major");
  start(kernel_of(step), step);
}

// Adds an output. A launch has outputs of one width, one dtype and one major: if this one differs,
// the outputs so far are computed first.
void add_output(WeightGradient& step, const WeightGradient::Part& part, int32_t workers) {
  const int64_t columns = part.out.shape[1];
  if (step.parts > 0 && (step.dense_columns != columns || !same_kind(step.part[0].out, part.out))) {
    run_weight_gradient(step, workers);
    step.parts = 0;
  }
  step.dense_columns = columns;
  step.part[step.parts++] = part;
}

}  // namespace

size_t weight_gradient_1_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int sms = device_of(sizes.plan).sms;
  return ExpertRanks::bytes(experts.E, weight_gradient_1_splits(experts, sizes, sms));
}
size_t weight_gradient_2_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int sms = device_of(sizes.plan).sms;
  return ExpertRanks::bytes(experts.E, weight_gradient_2_splits(experts, sizes, sms));
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
                          .dense_columns = 0,
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
    if (present(out))
      add_output(gradient, {.out = out, .dense_first = p * parts.columns}, step.workers);
  }
  run_weight_gradient(gradient, step.workers);
}

// ---- low-rank adapters

// The gradient of B comes with Q if both are bound by the bytes of dOut; else it is a GEMM of its own.
void lora_projection(const LoraProjection& step) {
  const bool wanted = step.gradient.parts > 0;
  if (wanted && has_output_gradient(step.rows.capacity, step.rows.E, step.out.shape[1]))
    return lora_output_gradient(step, device_of(step.tuning.plan));
  start(kernel_of(step), step);
  if (!wanted) return;
  LoraGradient gradient = step.gradient;
  gradient.scratch = step.scratch;
  lora_gradient(gradient);
}

namespace {

// Scaled P (capacity, rank), which precedes the scratch of the GEMMs. A rank is a multiple of 8, so
// these bytes are one of 16.
size_t scaled_bytes(const tilemoe_experts& experts, int64_t capacity, int64_t rank) {
  return static_cast<size_t>(capacity * rank) * tilemoe_dtype_size(experts.dtype);
}

// Columns [first, first + count) of a matrix.
tilemoe_tensor columns_of(tilemoe_tensor rows, int64_t first, int64_t count) {
  rows.data =
      static_cast<char*>(rows.data) + first * static_cast<int64_t>(tilemoe_dtype_size(rows.dtype));
  rows.shape[1] = count;
  return rows;
}

}  // namespace

size_t lora_gradient_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int64_t rank = max_rank(experts);
  if (rank == 0) return 0;
  const int sms = device_of(sizes.plan).sms;
  return scaled_bytes(experts, sizes.capacity, rank) +
         ExpertRanks::bytes(experts.E, lora_gradient_splits(experts, sizes, sms));
}

size_t lora_Q_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  const int64_t H_width = (tilemoe_activation_gated(experts.activation) != 0 ? 2 : 1) * experts.n;
  const auto bytes = [&](int64_t width, int64_t rank) {
    return has_output_gradient(sizes.capacity, experts.E, rank)
               ? lora_output_gradient_scratch_bytes(sizes.capacity, experts.E, width, rank,
                                                    device_of(sizes.plan))
               : lora_gradient_scratch_bytes(experts, sizes);
  };
  return std::max(bytes(H_width, experts.rank_1), bytes(experts.d, experts.rank_2));
}

// X and dO are the gathered side of a GEMM, dH and A' the dense side; P and Q are the other side of
// each.
void lora_gradient(const LoraGradient& step) {
  const size_t bytes = scaled_bytes(*step.experts, step.rows.capacity, step.P.shape[1]);
  TILEMOE_ASSERT(step.scratch.bytes >= bytes, step.scratch.bytes << " bytes of scratch for P");
  WeightGradient gradient{
      .experts = step.experts,
      .rows = step.rows,
      .dense = {},
      .dense_columns = 0,
      .gathered = {},
      .part = {},
      .parts = 0,
      .accumulate = step.accumulate,
      .scratch = {static_cast<char*>(step.scratch.data) + bytes, step.scratch.bytes - bytes},
      .splits = 0,
      .stream = step.stream,
      .tuning = step.tuning,
      .of_factor = true};
  // Computes the outputs that are wanted: dense^T gathered.
  const auto compute = [&](const tilemoe_tensor& gathered, const int32_t* token,
                           const tilemoe_tensor& dense, const auto& outputs) {
    gradient.gathered = gathered, gradient.rows.token = token, gradient.dense = dense;
    gradient.parts = 0;
    for (const WeightGradient::Part& output : outputs)
      if (present(output.out)) add_output(gradient, output, step.workers);
    run_weight_gradient(gradient, step.workers);
  };
  using OneOutput = WeightGradient::Part[1];
  const int32_t* const token = step.rows.token;

  if (step.gathers_input)
    compute(step.input, token, step.Q, OneOutput{{step.dA, 0}});
  else
    compute(step.Q, nullptr, step.input, OneOutput{{transposed(step.dA), 0}});

  WeightGradient::Part dB[2] = {};
  for (int p = 0; p < step.parts; ++p) dB[p] = {step.part[p].dB, step.part[p].first};
  if (!present(dB[0].out) && !present(dB[1].out)) return;
  tilemoe_tensor P = step.P;
  P.data = step.scratch.data, P.stride[0] = P.shape[1];
  scale_rows({.rows = step.rows,
              .from = step.P,
              .scale = step.scale,
              .score = step.gathers_input ? nullptr : step.rows.score,
              .to = P,
              .device = device_of(step.tuning.plan),
              .stream = step.stream});
  if (step.gathers_input) {
    compute(P, nullptr, step.dOut, dB);
    return;
  }
  for (const auto& [out, first] : dB)
    if (present(out))
      compute(columns_of(step.dOut, first, out.shape[1]), token, P,
              OneOutput{{transposed(out), 0}});
}

}  // namespace tilemoe::cuda
