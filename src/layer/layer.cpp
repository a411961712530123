#include "layer/layer.h"

#include <algorithm>
#include <optional>

#include "core/backend.h"
#include "core/check.h"
#include "core/formats.h"
#include "layer/call.h"
#include "layer/quantized.h"
#include "layer/steps.h"
#include "layer/workspace.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

// The routing of the tokens of a part, for combine.
tilemoe_routing routing_of(tilemoe_routing routing, const std::optional<tilemoe_part>& part) {
  if (!part) return routing;
  routing.spec.T = part->tokens;
  if (routing.token_offsets != nullptr)
    routing.token_offsets += part->first_token;
  else
    routing.pair_row += part->first_token * routing.spec.K;
  return routing;
}

// Up to this number of rows a GEMM takes little longer than its launch: 64 tokens, 32 experts each.
constexpr int64_t kSmallT = 2048;

Tuning forward_tuning(const ForwardCall& call) {
  Tuning tuning = tuning_of(call.args.block_turns, call.kernels);
  // The kernel before one GEMM alone is the caller's, and may write its weights.
  tuning.pdl =
      call.routing.spec.capacity <= kSmallT && call.gemms == Gemms::kBoth && !is_fp8(call.experts);
  return tuning;
}

// With PDL a GEMM may read its weights before the previous kernel has ended: those that this kernel
// writes must not be read then.
Tuning gemm_tuning(Tuning tuning, tilemoe_format format) {
  tuning.pdl = tuning.pdl && format == TILEMOE_FORMAT_NONE;
  return tuning;
}

}  // namespace

tilemoe_saved_size saved_bytes(const tilemoe_experts* given_experts,
                               const tilemoe_routing_spec* routing) {
  const tilemoe_experts experts = read_experts(given_experts);
  const tilemoe_routing_spec spec = read_spec(routing, experts);
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  tilemoe_saved_size size{};
  size.rows = static_cast<size_t>(checked_product(
      checked_product(outer_rows(spec), experts.d, "T * d"), element, "bytes of X"));
  if (saves_fp8_H(experts)) size.H_scales = fp8_H_scale_bytes(experts, spec);
  size.H = saves_fp8_H(experts) ? fp8_H_code_bytes(experts, spec) + size.H_scales
                                : row_bytes(experts, spec, h_width(experts));
  size.routing = routing_bytes(spec);
  size.P1 = row_bytes(experts, spec, experts.rank_1);
  size.P2 = row_bytes(experts, spec, experts.rank_2);
  size.total = size.rows + size.H + size.routing + size.P1 + size.P2;
  return size;
}

namespace {

// The device of a query, which the sizes of scratch depend on; null for the current one.
KernelPlan described_device(const tilemoe_workspace_query& query, const tilemoe_experts& experts,
                            const Backend& backend) {
  TILEMOE_CHECK(
      query.cuda_sms >= 0 && query.cuda_sms <= TILEMOE_MAX_SMS,
      "cuda_sms is " << query.cuda_sms << ", expected a value in [0, " << TILEMOE_MAX_SMS << "]");
  if (query.cuda_sms == 0) {
    TILEMOE_CHECK(query.cuda_arch == nullptr,
                  "cuda_arch is " << query.cuda_arch << " without cuda_sms, expected null");
    backend.check_supported(experts);
    return nullptr;
  }
  TILEMOE_CHECK(backend.plan_without_device != nullptr,
                "cuda_sms is " << query.cuda_sms << ", expected 0: the device is the CPU");
  return backend.plan_without_device(experts, query.cuda_sms, query.cuda_arch);
}

}  // namespace

size_t workspace_bytes(const tilemoe_workspace_query* given) {
  const tilemoe_workspace_query query = read_struct("query", given);
  const tilemoe_experts experts = read_experts(query.experts);
  const tilemoe_routing_spec spec = read_spec(query.routing, experts);
  const Backend& backend =
      query.cuda_sms > 0 ? backend_of_build(experts.device) : backend_for(experts.device);
  const KernelPlan device = described_device(query, experts, backend);
  if (query.pass == TILEMOE_PASS_INFERENCE || query.pass == TILEMOE_PASS_FORWARD) {
    TILEMOE_CHECK(query.mode == 0 && query.gradients == 0,
                  "mode is " << static_cast<int>(query.mode) << " and gradients " << query.gradients
                             << ", expected 0: the pass is not backward");
    return ForwardPlan(backend, experts, spec, query.pass == TILEMOE_PASS_FORWARD, device).total;
  }
  BackwardWork work = work_of(query, experts);
  const size_t bytes = BackwardPlan(backend, experts, spec, work, device).total;
  if (!writes_dH_codes(backend, experts)) return bytes;
  work.dX_is_free = true;  // or not, as the arguments of the call are
  return std::max(bytes, BackwardPlan(backend, experts, spec, work, device).total);
}

namespace {

// The caller's, or those in the workspace: of the call's tokens, which are quantised.
Fp8Rows codes_of_X(const ForwardCall& call, const StepRunner& run) {
  const tilemoe_forward_args& args = call.args;
  if (args.X_codes != nullptr)  // a step reads them alone
    return {const_cast<uint8_t*>(args.X_codes), const_cast<float*>(args.X_scales)};
  const Fp8Rows all = codes_at(args.workspace, call.plan.X_codes);
  if (call.routing.spec.capacity > 0) quantize_tokens(run, &Steps::quantize_X, call, call.X, all);
  return all;
}

}  // namespace

void run_forward(const ForwardCall& call, const tilemoe_tensor& A, StepObserver* observer) {
  const StepRunner run(call.backend, observer);
  const tilemoe_forward_args& args = call.args;
  const tilemoe_routing_spec& spec = call.routing.spec;
  const Scratch scratch = scratch_at(args.workspace, call.plan.scratch);
  const tilemoe_weights& weights = call.weights;
  const Rows rows = rows_of(call.routing, call.part);
  const tilemoe_routing routing = routing_of(call.routing, call.part);
  const Tuning tuning = forward_tuning(call);
  const auto rank_rows = [&](const tilemoe_tensor& saved, size_t place, int64_t rank) {
    return rank == 0 || args.saved ? saved
                                   : region(call.experts, spec, args.workspace, place, rank);
  };
  const tilemoe_tensor P1 = rank_rows(call.saved.P1, call.plan.P1, call.experts.rank_1);
  const tilemoe_tensor P2 = rank_rows(call.saved.P2, call.plan.P2, call.experts.rank_2);
  const auto project = [&](StepRow<LoraProjection> Steps::*step, const tilemoe_tensor& source,
                           bool gathers, const tilemoe_tensor& factor, const tilemoe_tensor& out) {
    if (spec.capacity > 0 && present(out))
      run(step, {.experts = &call.experts,
                 .rows = gathers ? rows : without_tokens(rows),
                 .source = source,
                 .factor = factor,
                 .out = out,
                 .scratch = scratch,
                 .stream = args.stream,
                 .tuning = tuning});
  };

  const bool fp8 = is_fp8(call.experts);
  const bool float_scales = call.experts.float_scales != 0;
  const Fp8Rows X_codes = fp8 ? codes_of_X(call, run) : Fp8Rows{};
  const Fp8Rows A_codes = fp8 ? codes_at(args.workspace, call.plan.A_codes) : Fp8Rows{};
  CodesRead codes{fp8, fp8};
  if (!fp8 && call.backend.reads_codes != nullptr)
    codes = call.backend.reads_codes({call.experts, weights, spec.capacity, call.kernels.get()});
  const WeightBlocks blocks({.run = run,
                             .experts = call.experts,
                             .quantized = call.quantized,
                             .weights = weights,
                             .workspace = static_cast<char*>(args.workspace),
                             .stream = args.stream,
                             .codes = codes});

  project(&Steps::lora_P1, args.X, true, call.lora.A1, P1);
  const auto up_projection = [&](const ExpertBlock& block, const UpWeights& up) {
    run(&Steps::up_projection, {.experts = &call.experts,
                                .rows = block.rows,
                                .X = call.X,
                                .weights = up,
                                .H = call.saved.H,
                                .A = A,
                                .scratch = scratch,
                                .stream = args.stream,
                                .tuning = gemm_tuning(tuning, blocks.format_1()),
                                .adapter = {P1, block.of(call.lora.B1)},
                                .codes = blocks.codes_1(),
                                .X_codes = X_codes,
                                .A_codes = A_codes,
                                .float_scales = float_scales,
                                .H_codes = {call.saved.H_codes, call.saved.H_scales}});
  };
  if (spec.capacity > 0 && call.gemms != Gemms::kSecond)
    blocks.for_each_W1(&Steps::dequantize_W1, call.plan.W1, rows, false, up_projection);
  if (call.gemms == Gemms::kFirst) return;
  project(&Steps::lora_P2, A, false, call.lora.A2, P2);
  for_each_block(call.experts.d, call.plan.block_columns, [&](int64_t first, int64_t columns) {
    const tilemoe_tensor Y = region(call.experts, spec, args.workspace, call.plan.Y, columns);
    const auto down_projection = [&](const ExpertBlock& block, const tilemoe_tensor& W2) {
      run(&Steps::down_projection,
          {.experts = &call.experts,
           .rows = block.rows,
           .A = A,
           .W2 = slice(W2, 1, first, columns),
           .b2 = slice(block.of(weights.b2), 1, first, columns),
           .Y = Y,
           .scratch = scratch,
           .stream = args.stream,
           .tuning = gemm_tuning(tuning, blocks.format_2()),
           .adapter = {P2, slice(block.of(call.lora.B2), 1, first, columns)},
           .codes = blocks.codes_2(first),
           .A_codes = A_codes});
    };
    if (spec.capacity > 0)
      blocks.for_each_W2(&Steps::dequantize_W2, call.plan.W2, rows, first > 0, down_projection);
    run(&Steps::combine, {.experts = &call.experts,
                          .routing = &routing,
                          .row_values = Y,
                          .scale_by_score = true,
                          .addend = tokens_of(slice(args.addend, 1, first, columns), call.part),
                          .out = tokens_of(slice(args.O, 1, first, columns), call.part),
                          .stream = args.stream,
                          .tuning = tuning});
  });
}

void forward(const tilemoe_experts* experts, const tilemoe_forward_args* given,
             StepObserver* observer) {
  const ForwardCall call(experts, given);
  if (call.args.dry_run != 0) return;
  tilemoe_tensor A{};  // in the fp8 recipes only for an adapter of W2
  if (!is_fp8(call.experts) || call.experts.rank_2 > 0)
    A = region(call.experts, call.routing.spec, call.args.workspace, call.plan.A, call.experts.n);
  run_forward(call, A, observer);
  tilemoe_saved* const saved = call.args.saved;
  if (saved) saved->state = TILEMOE_SAVED_H, saved->dH = nullptr;
}

}  // namespace tilemoe
