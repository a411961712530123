#include "core/backend.h"
#include "core/check.h"
#include "layer/arguments.h"
#include "layer/backward_places.h"
#include "layer/call.h"
#include "layer/layer.h"
#include "layer/lora.h"
#include "layer/quantized.h"
#include "layer/steps.h"

namespace tilemoe {
namespace {

// The steps of one backward, in the order of the memory plan.
class BackwardSteps {
 public:
  BackwardSteps(const BackwardCall& call, StepObserver* observer)
      : call_(call),
        run_(call.backend, observer),
        experts_(&call.experts),
        rows_(rows_of(call.routing)),
        any_rows_(call.routing.spec.capacity > 0),
        base_(static_cast<char*>(call.args.workspace)),
        dH_(place_of_dH(call)),
        A_scaled_(place_of_A_scaled(call)),
        Q2_(rank_rows(experts_->rank_2 > 0 && call.work.needs_activation_gradient(), call.plan.Q2,
                      experts_->rank_2)),
        Q1_(rank_rows(call.work.needs_Q1(call.experts), call.plan.Q1, experts_->rank_1)),
        ds_partial_(reinterpret_cast<float*>(base_ + call.plan.ds_partial)),
        fp8_(is_fp8_backward(call.experts)),
        quantized_(fp8_ ? transposed_of(call.quantized) : call.quantized),
        blocks_({.run = run_,
                 .experts = call.experts,
                 .quantized = quantized_,
                 .weights = call.weights,
                 .workspace = base_,
                 .stream = call.args.stream,
                 .codes = {fp8_, fp8_}}),
        accumulate_(call.args.accumulate != 0),
        tuning_(tuning_of(call.args.block_turns, call.kernels)) {}

  // dH, A' and the partial sums of ds, as far as the call requires them.
  void activation_gradient() const {
    if (!any_rows_ || !call_.work.needs_activation_gradient()) return;
    const Rows rows = rows_of(call_.routing, call_.part);
    if (present(Q2_))
      run_(&Steps::lora_Q2,
           {.experts = experts_,
            .rows = rows,
            .source = call_.args.dO,
            .factor = transposed(call_.lora.B2),
            .out = Q2_,
            .scratch = scratch_at(base_, call_.plan.Q2_scratch),
            .stream = call_.args.stream,
            .tuning = tuning_,
            .gradient = dB2_with_Q2() ? gradient_of_B(gradient_2()) : LoraGradient{}});
    const Fp8Rows dO_codes = fp8_ ? place_of_dO_codes(call_) : Fp8Rows{};
    if (fp8_) quantize_tokens(run_, &Steps::quantize_dO, call_, call_.args.dO, dO_codes);
    const auto gradient = [&](const ExpertBlock& block, const tilemoe_tensor& W2) {
      run_(&Steps::activation_gradient,
           {.experts = experts_,
            .rows = block.rows,
            .dO = call_.args.dO,
            .W1 = call_.weights.W1,
            .W2 = W2,
            .H = call_.saved.H,
            .dH = call_.work.needs_dH() ? dH_ : tilemoe_tensor{},
            .A_scaled = wants(BackwardWork::kNeedsAScaled) ? A_scaled_ : tilemoe_tensor{},
            .ds_partial = wants(TILEMOE_GRADIENT_S) ? ds_partial_ : nullptr,
            .scratch = scratch_at(base_, call_.plan.activation_scratch),
            .stream = call_.args.stream,
            .tuning = tuning_,
            .adapter = {Q2_, transposed_or_absent(block.of(call_.lora.A2))},
            .codes = blocks_.codes_2(0),
            .dO_codes = dO_codes,
            .H_codes = {call_.saved.H_codes, call_.saved.H_scales},
            .dH_codes = call_.plan.writes_dH_codes ? place_of_dH_codes(call_) : Fp8Rows{}});
    };
    blocks_.for_each_W2(&Steps::dequantize_W2_again, call_.plan.W2, rows, false, gradient);
  }

  void score_gradient() const {
    if (!wants(TILEMOE_GRADIENT_S)) return;
    run_(&Steps::score_gradient, {.experts = experts_,
                                  .routing = &call_.routing,
                                  .ds_partial = ds_partial_,
                                  .dO = call_.args.dO,
                                  .b2 = call_.weights.b2,
                                  .ds = static_cast<float*>(call_.args.ds.data),
                                  .stream = call_.args.stream,
                                  .tuning = tuning_});
  }

  // Sums over no rows are zeros, here and below.
  void weight_gradient_2() const {
    if (!wants(TILEMOE_GRADIENT_W2)) return;
    run_(&Steps::weight_gradient_2, {.experts = experts_,
                                     .rows = rows_,
                                     .dO = call_.args.dO,
                                     .A_scaled = A_scaled_,
                                     .dW2 = call_.gradients.W2,
                                     .accumulate = accumulate_,
                                     .scratch = scratch_of_dW2(call_),
                                     .stream = call_.args.stream,
                                     .tuning = tuning_});
  }

  void lora_gradient_2() const {
    if (experts_->rank_2 == 0 || !wants(TILEMOE_GRADIENT_LORA_2)) return;
    run_lora_gradient(&Steps::lora_gradient_2, gradient_2(), dB2_with_Q2(),
                      call_.plan.lora_2_scratch);
  }

  void input_gradient() const {
    if (any_rows_ && present(Q1_))
      run_(&Steps::lora_Q1,
           {.experts = experts_,
            .rows = without_tokens(rows_),
            .source = dH_,
            .factor = transposed(call_.lora.B1),
            .out = Q1_,
            .scratch = scratch_at(base_, call_.plan.Q1_scratch),
            .stream = call_.args.stream,
            .tuning = tuning_,
            .gradient = dB1_with_Q1() ? gradient_of_B(gradients_1().step[0]) : LoraGradient{}});
    if (!wants(TILEMOE_GRADIENT_X)) return;
    const Fp8Rows dH_codes = fp8_ ? place_of_dH_codes(call_) : Fp8Rows{};
    if (fp8_ && any_rows_ && !call_.plan.writes_dH_codes)
      run_(&Steps::quantize_dH, {.values = dH_,
                                 .out = dH_codes,
                                 .float_scales = experts_->float_scales != 0,
                                 .stream = call_.args.stream,
                                 .parts = 2,
                                 .end = call_.routing.offsets + experts_->E});
    for_each_block(call_.experts.d, call_.plan.block_columns, [&](int64_t first, int64_t columns) {
      const tilemoe_tensor dX_rows =
          region(call_.experts, call_.routing.spec, base_, call_.plan.dX_rows, columns);
      const auto gradient = [&](const ExpertBlock& block, const UpWeights& up) {
        const tilemoe_tensor A1 = slice(block.of(call_.lora.A1), 2, first, columns);
        run_(&Steps::input_gradient, {.experts = experts_,
                                      .rows = block.rows,
                                      .dH = dH_,
                                      .weights = {slice(up.W1, 2, first, columns),
                                                  slice(up.W1_up, 2, first, columns),
                                                  {},
                                                  {}},
                                      .dX_rows = dX_rows,
                                      .scratch = scratch_at(base_, call_.plan.dX_scratch),
                                      .stream = call_.args.stream,
                                      .tuning = tuning_,
                                      .adapter = {Q1_, transposed_or_absent(A1)},
                                      .codes = blocks_.codes_1(first),
                                      .dH_codes = dH_codes});
      };
      if (any_rows_)
        blocks_.for_each_W1(&Steps::dequantize_W1_again, call_.plan.W1, rows_, first > 0, gradient);
      run_(&Steps::combine_dX, {.experts = experts_,
                                .routing = &call_.routing,
                                .row_values = dX_rows,
                                .scale_by_score = false,
                                .addend = slice(call_.args.addend, 1, first, columns),
                                .out = slice(call_.args.dX, 1, first, columns),
                                .stream = call_.args.stream,
                                .tuning = tuning_});
    });
  }

  void weight_gradient_1() const {
    if (!wants(TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP)) return;
    run_(&Steps::weight_gradient_1, {.experts = experts_,
                                     .rows = rows_,
                                     .W1 = call_.weights.W1,
                                     .dH = dH_,
                                     .X = call_.args.X,
                                     .dW1 = call_.gradients.W1,
                                     .dW1_up = call_.gradients.W1_up,
                                     .accumulate = accumulate_,
                                     .scratch = scratch_at(base_, call_.plan.dW1_scratch),
                                     .stream = call_.args.stream,
                                     .tuning = tuning_});
  }

  void lora_gradient_1() const {
    if (experts_->rank_1 == 0 || !wants(TILEMOE_GRADIENT_LORA_1)) return;
    const Gradients1 gradients = gradients_1();
    for (int i = 0; i < gradients.count; ++i)
      run_lora_gradient(&Steps::lora_gradient_1, gradients.step[i], dB1_with_Q1(),
                        call_.plan.lora_1_scratch);
  }

  void bias_gradient() const {
    const bool db1 = wants(TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP);
    if (!db1 && !wants(TILEMOE_GRADIENT_B2)) return;
    run_(&Steps::bias_gradient, {.experts = experts_,
                                 .rows = rows_,
                                 .dO = call_.args.dO,
                                 .db2 = call_.gradients.b2,
                                 .W1 = call_.weights.W1,
                                 .dH = db1 ? dH_ : tilemoe_tensor{},
                                 .db1 = call_.gradients.b1,
                                 .db1_up = call_.gradients.b1_up,
                                 .accumulate = accumulate_,
                                 .scratch = scratch_at(base_, call_.plan.bias_scratch),
                                 .stream = call_.args.stream});
  }

 private:
  bool wants(uint32_t any_of) const { return call_.work.wants(any_of); }

  // The weights that steps read as codes.
  static tilemoe_quantized_weights transposed_of(tilemoe_quantized_weights quantized) {
    quantized.W1 = quantized.W1_transposed, quantized.W1_up = quantized.W1_up_transposed;
    quantized.W2 = quantized.W2_transposed;
    return quantized;
  }
  static tilemoe_tensor transposed_or_absent(const tilemoe_tensor& factor) {
    return present(factor) ? transposed(factor) : factor;
  }
  tilemoe_tensor rank_rows(bool needed, size_t place, int64_t rank) const {
    if (!needed) return {};
    return region(call_.experts, call_.routing.spec, base_, place, rank);
  }

  // The gradients of an adapter's factors, without scratch.
  LoraGradient with_call(LoraGradient step, const tilemoe_tensor& input,
                         const tilemoe_tensor& dOut) const {
    step.experts = experts_, step.rows = rows_;
    step.input = input, step.dOut = dOut;
    step.accumulate = accumulate_;
    step.stream = call_.args.stream, step.tuning = tuning_;
    return step;
  }
  LoraGradient gradient_2() const {
    LoraGradient step = tilemoe::lora_gradient_2(call_.lora, call_.lora_gradients);
    step.P = call_.saved.P2, step.Q = Q2_;
    return with_call(step, A_scaled_, call_.args.dO);
  }
  struct Gradients1 {
    LoraGradient step[2];
    int count;
  };
  Gradients1 gradients_1() const {
    Gradients1 all;
    all.count = lora_gradients_1(*experts_, call_.weights, call_.lora, call_.lora_gradients,
                                 call_.saved.P1, Q1_, all.step);
    for (LoraGradient& step : all.step) step = with_call(step, call_.args.X, dH_);
    return all;
  }

  // The gradient of B comes with Q, by one read of dO or dH, if one step computes Q of all rows. The
  // Q1 of split gates has the columns of two adapters.
  bool dB2_with_Q2() const {
    return any_rows_ && present(Q2_) && !call_.part && wants(TILEMOE_GRADIENT_LORA_2);
  }
  bool dB1_with_Q1() const {
    return any_rows_ && present(Q1_) && wants(TILEMOE_GRADIENT_LORA_1) &&
           experts_->gate_layout != TILEMOE_GATE_SPLIT;
  }
  static LoraGradient gradient_of_B(LoraGradient step) {
    step.dA = {};
    return step;
  }
  void run_lora_gradient(StepRow<LoraGradient> Steps::*row, LoraGradient step, bool without_B,
                         const ScratchRegion& scratch) const {
    if (without_B) step.parts = 0;
    if (step.parts == 0 && !present(step.dA)) return;
    step.scratch = scratch_at(base_, scratch);
    run_(row, step);
  }

  const BackwardCall& call_;
  const StepRunner run_;
  const tilemoe_experts* experts_;
  const Rows rows_;
  const bool any_rows_;
  char* const base_;  // of the workspace
  const tilemoe_tensor dH_, A_scaled_;
  const tilemoe_tensor Q2_, Q1_;  // absent without an adapter
  float* const ds_partial_;
  const bool fp8_;
  const tilemoe_quantized_weights quantized_;
  const WeightBlocks blocks_;
  const bool accumulate_;
  const Tuning tuning_;
};

// Called before the first kernel that writes dH over H: if the call fails, or other parts follow, H is
// neither what forward wrote nor dH.
void begin_over_H(const BackwardCall& call, tilemoe_saved& saved) {
  if (call.args.mode != TILEMOE_BACKWARD_OVER_H) return;
  if (call.counts_parts()) {
    if (saved.state != TILEMOE_SAVED_PARTS_OF_DH) saved.parts_tokens = 0;
    saved.parts_tokens += call.part ? call.part->tokens : call.routing.spec.T;
  }
  saved.state = TILEMOE_SAVED_PARTS_OF_DH, saved.dH = nullptr;
}

// Intermediate results that a backward leaves for the next call.
void update_saved(const BackwardCall& call, tilemoe_saved& saved) {
  switch (call.args.mode) {
    case TILEMOE_BACKWARD_WHOLE: saved.state = TILEMOE_SAVED_H, saved.dH = nullptr; return;
    case TILEMOE_BACKWARD_OVER_H: saved.state = TILEMOE_SAVED_DH_OVER_H, saved.dH = nullptr; return;
    case TILEMOE_BACKWARD_FIRST:
      saved.state = TILEMOE_SAVED_H_AND_DH, saved.dH = call.args.workspace;
      return;
    case TILEMOE_BACKWARD_REST: return;
  }
}

}  // namespace

// In this order dX~ is no longer needed when the scratch of dW1 is used.
void run_backward(const BackwardCall& call, tilemoe_saved& saved, StepObserver* observer) {
  const BackwardSteps run(call, observer);
  begin_over_H(call, saved);
  run.activation_gradient();
  if (call.part && !call.part->last) return;  // the other steps take all rows
  update_saved(call, saved);
  run.score_gradient();
  run.weight_gradient_2();
  run.lora_gradient_2();
  run.input_gradient();
  run.weight_gradient_1();
  run.lora_gradient_1();
  run.bias_gradient();
}

void backward(const tilemoe_experts* experts, const tilemoe_backward_args* given,
              StepObserver* observer) {
  const BackwardCall call(experts, given);
  if (call.args.dry_run != 0) return;
  run_backward(call, *call.args.saved, observer);
}

}  // namespace tilemoe
