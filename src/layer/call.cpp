#include "layer/call.h"

#include <cstddef>

#include "core/check.h"
#include "core/formats.h"
#include "core/overlap.h"
#include "layer/lora.h"
#include "layer/quantized.h"
#include "layer/steps.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

// The arguments are checked.
KernelPlan plan_kernels(const Backend& backend, const tilemoe_experts& experts,
                        const tilemoe_routing& routing, const tilemoe_weights& weights) {
  if (backend.plan == nullptr) return nullptr;
  return backend.plan({.experts = experts,
                       .rows = rows_of(routing),
                       .weights = weights,
                       .Y_columns = output_block_columns(experts),
                       .dX_columns = input_block_columns(experts, routing.spec, false),
                       .dX_columns_over_H = input_block_columns(experts, routing.spec, true)});
}

}  // namespace

// ----------------------------------------------------------------- forward

ForwardCall::ForwardCall(const tilemoe_experts* given_experts, const tilemoe_forward_args* given)
    : experts(read_experts(given_experts)),
      args(read_struct("forward args", given)),
      routing(read_routing_of(args.routing, experts)),
      quantized(read_quantized(args.quantized, experts, /*reads_transposed=*/false)),
      weights(checked_weights()),
      lora(read_lora(args.lora, experts, weights)),
      saved(args.saved ? read_struct("saved", args.saved) : tilemoe_saved{}),
      part(read_part(args.part, routing.spec)),
      X(checked_X()),
      backend(backend_for(experts.device)),
      kernels(checked_kernels()),
      plan(backend, experts, routing.spec, args.saved != nullptr, kernels) {
  if (args.dry_run == 0) check_workspace(args.workspace, args.workspace_bytes, plan.total);
  check_memory();
}

ForwardCall::ForwardCall(const CheckedCall& checked, const tilemoe_forward_args& given, Gemms which)
    : experts(checked.experts),
      args(given),
      routing(checked.routing),
      quantized{},
      weights(checked.weights),
      lora{},
      saved{},
      X(args.X),
      backend(backend_for(experts.device)),
      kernels(plan_kernels(backend, experts, routing, weights)),
      plan(backend, experts, routing.spec, false, kernels, which),
      gemms(which) {
  check_workspace(args.workspace, args.workspace_bytes, plan.total);
}

tilemoe_weights ForwardCall::checked_weights() const {
  const tilemoe_weights read = read_struct("weights", args.weights);
  check_weights(experts, read);
  return with_dequantized(read, experts, quantized);
}

// X, or the shape of X that is given as codes.
tilemoe_tensor ForwardCall::checked_X() const {
  if (args.X_codes == nullptr) {
    TILEMOE_CHECK(args.X_scales == nullptr, "X_scales is given without X_codes, expected null");
    check_rows("X", args.X, experts, routing.spec);
    return args.X;
  }
  TILEMOE_CHECK(is_fp8(experts),
                "X_codes is given, expected null: it requires the recipe fp8 or fp8_forward");
  check_absent("X", args.X, "X_codes is given");
  TILEMOE_CHECK(
      experts.rank_1 == 0,
      "X_codes is given, but an adapter of W1 reads X in 16 bits: rank_1 is " << experts.rank_1);
  TILEMOE_CHECK(args.X_scales != nullptr, "X_codes is given and X_scales is null");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(args.X_codes) % kFp8RowAlignment == 0,
                "X_codes is not aligned to " << kFp8RowAlignment << " bytes");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(args.X_scales) % alignof(float) == 0,
                "X_scales is not aligned to " << alignof(float) << " bytes");
  return {.data = nullptr,
          .dtype = experts.dtype,
          .ndim = 2,
          .shape = {outer_rows(routing.spec), experts.d},
          .stride = {experts.d, 1}};
}

KernelPlan ForwardCall::checked_kernels() const {
  check_flag("dry_run", args.dry_run);
  check_block_turns(args.block_turns);
  check_rows("O", args.O, experts, routing.spec);
  check_optional_rows("addend", args.addend, experts, routing.spec);
  if (args.saved) {
    check_H(experts, routing.spec, saved);
    check_P(experts, routing.spec, saved);
  }
  backend.check_limits({experts, routing.spec, weights, X, {}, {}});
  return plan_kernels(backend, experts, routing, weights);
}

// X has been read when O is written, and an element of the addend just before that of O.
void ForwardCall::check_memory() const {
  MemoryUse memory;
  memory.writes("O", args.O);
  memory.writes("saved.H", saved.H);
  use_fp8_H(memory, experts, routing.spec, saved, /*writes=*/true);
  memory.writes("saved.P1", saved.P1);
  memory.writes("saved.P2", saved.P2);
  if (args.dry_run == 0) memory.writes("workspace", args.workspace, plan.total);
  memory.reads("X", args.X, "O");
  if (args.X_codes != nullptr) {
    const auto rows = static_cast<size_t>(X.shape[0]);
    memory.reads("X_codes", args.X_codes, rows * static_cast<size_t>(experts.d));
    memory.reads("X_scales", args.X_scales,
                 rows * static_cast<size_t>(blocks_of(experts.d, kFp8Tile)) * sizeof(float));
  }
  memory.reads("addend", args.addend, same_view(args.addend, args.O) ? "O" : nullptr);
  read_weights_and_routing(memory, weights, routing, part);
  read_quantized_memory(memory, quantized, experts);
  read_lora_memory(memory, lora);
  memory.check();
}

// ---------------------------------------------------------------- backward

BackwardCall::BackwardCall(const tilemoe_experts* given_experts, const tilemoe_backward_args* given)
    : experts(read_experts(given_experts)),
      args(read_struct("backward args", given)),
      routing(read_routing_of(args.routing, experts)),
      quantized(read_quantized(args.quantized, experts, /*reads_transposed=*/true)),
      weights(checked_weights()),
      gradients(args.dweights ? read_struct("dweights", args.dweights) : tilemoe_weights{}),
      lora(read_lora(args.lora, experts, weights)),
      lora_gradients(read_lora_gradients(args.dlora, experts, weights, lora)),
      saved(read_struct("saved", args.saved)),
      part(read_part(args.part, routing.spec)),
      backend(backend_for(experts.device)),
      work(requested_work()),
      kernels(checked_kernels()),
      plan(backend, experts, routing.spec, work, kernels) {
  if (args.dry_run == 0) check_workspace(args.workspace, args.workspace_bytes, plan.total);
  check_memory();
}

BackwardCall::BackwardCall(const CheckedCall& checked, const tilemoe_backward_args& given,
                           const tilemoe_weights& given_gradients, const tilemoe_saved& given_saved,
                           const BackwardWork& given_work, const tilemoe_tensor& given_dH)
    : experts(checked.experts),
      args(given),
      routing(checked.routing),
      quantized{},
      weights(checked.weights),
      gradients(given_gradients),
      lora{},
      lora_gradients{},
      saved(given_saved),
      backend(backend_for(experts.device)),
      work(given_work),
      dH(given_dH),
      kernels(plan_kernels(backend, experts, routing, weights)),
      plan(backend, experts, routing.spec, work, kernels) {
  check_workspace(args.workspace, args.workspace_bytes, plan.total);
}

BackwardWork BackwardCall::requested_work() const {
  TILEMOE_CHECK(args.mode >= TILEMOE_BACKWARD_WHOLE && args.mode <= TILEMOE_BACKWARD_REST,
                "mode is " << static_cast<int>(args.mode) << ", expected a value in [0, 3]");
  BackwardWork requested{.mode = args.mode};
  requested.dH_over_H =
      args.mode == TILEMOE_BACKWARD_OVER_H ||
      (args.mode == TILEMOE_BACKWARD_REST && saved.state == TILEMOE_SAVED_DH_OVER_H);
  const auto request = [&](const tilemoe_tensor& gradient, uint32_t bit) {
    if (present(gradient)) requested.gradients |= bit;
  };
  request(args.dX, TILEMOE_GRADIENT_X);
  requested.dX_is_free = present(args.dX) && !present(args.addend) && args.part == nullptr &&
                         (args.dX.shape[0] == 1 || args.dX.stride[0] == experts.d);
  request(args.ds, TILEMOE_GRADIENT_S);
  request(gradients.W1, TILEMOE_GRADIENT_W1);
  request(gradients.W1_up, TILEMOE_GRADIENT_W1_UP);
  request(gradients.W2, TILEMOE_GRADIENT_W2);
  request(gradients.b1, TILEMOE_GRADIENT_B1);
  request(gradients.b1_up, TILEMOE_GRADIENT_B1_UP);
  request(gradients.b2, TILEMOE_GRADIENT_B2);
  for (const tilemoe_tensor* of_1 :
       {&lora_gradients.A1, &lora_gradients.B1, &lora_gradients.A1_up, &lora_gradients.B1_up})
    request(*of_1, TILEMOE_GRADIENT_LORA_1);
  request(lora_gradients.A2, TILEMOE_GRADIENT_LORA_2);
  request(lora_gradients.B2, TILEMOE_GRADIENT_LORA_2);
  return requested;
}

tilemoe_weights BackwardCall::checked_weights() const {
  const tilemoe_weights read = read_struct("weights", args.weights);
  check_weights(experts, read);
  return with_dequantized(read, experts, quantized);
}

KernelPlan BackwardCall::checked_kernels() const {
  const tilemoe_routing_spec& spec = routing.spec;
  check_flag("dry_run", args.dry_run);
  check_block_turns(args.block_turns);
  check_flag("accumulate", args.accumulate);
  check_weight_gradients();
  check_H(experts, spec, saved, {.values = !work.from_dH(), .memory_of_dH = work.dH_over_H});
  check_P(experts, spec, saved);
  check_rows("X", args.X, experts, spec);
  if (!work.from_dH()) check_rows("dO", args.dO, experts, spec);
  check_optional_rows("dX", args.dX, experts, spec);
  check_optional_rows("addend", args.addend, experts, spec);
  TILEMOE_CHECK(!present(args.addend) || present(args.dX), "addend is given but dX is absent");
  check_ds(args.ds, spec);
  backend.check_limits({experts, spec, weights, args.X, args.dO, gradients});
  check_mode();
  return plan_kernels(backend, experts, routing, weights);
}

void BackwardCall::check_weight_gradients() const {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const DTypes dtypes = {experts.dtype, TILEMOE_FLOAT32};
  check_no_quantized_gradients(experts, gradients);
  const TensorRule w1{{E, w1_rows(experts), d}, dtypes, Strides::kMatrixEitherMajor};
  const TensorRule up{{E, n, d}, dtypes, Strides::kMatrixEitherMajor};
  check_optional("dweights.W1", gradients.W1, w1);
  check_optional("dweights.W2", gradients.W2, {{E, d, n}, dtypes, Strides::kMatrixEitherMajor});
  check_optional("dweights.b1", gradients.b1, {{E, w1_rows(experts)}, dtypes, Strides::kRows});
  check_optional("dweights.b2", gradients.b2, {{E, d}, dtypes, Strides::kRows});
  if (split(experts)) {
    check_optional("dweights.W1_up", gradients.W1_up, up);
    check_optional("dweights.b1_up", gradients.b1_up, {{E, n}, dtypes, Strides::kRows});
  } else {
    check_absent("dweights.W1_up", gradients.W1_up, "it requires the split gate layout");
    check_absent("dweights.b1_up", gradients.b1_up, "it requires the split gate layout");
  }
  // With such a W1, H has all gate columns before all up columns.
  if (experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(gradients.W1))
    TILEMOE_CHECK(contiguous_along_d(gradients.W1) || !contiguous_along_d(weights.W1),
                  "dweights.W1 is interleaved and contiguous along 2n, and weights.W1 along d: "
                  "expected dweights.W1 to be contiguous along d, too");
}

// Whether the saved state has what the mode starts from.
void BackwardCall::check_mode() const {
  TILEMOE_CHECK(
      saved.state >= TILEMOE_SAVED_H && saved.state <= TILEMOE_SAVED_PARTS_OF_DH,
      "saved.state is " << static_cast<int>(saved.state) << ", expected a value in [0, 3]");
  TILEMOE_CHECK(!part || !work.from_dH(), "part is given, expected null: mode is REST");
  check_parts();
  if (!work.from_dH()) {
    TILEMOE_CHECK(saved.state != TILEMOE_SAVED_DH_OVER_H,
                  "saved was consumed by a backward that wrote dH over H; use mode REST or run "
                  "forward again");
    return;
  }
  TILEMOE_CHECK(saved.state != TILEMOE_SAVED_H,
                "mode is REST, which requires a previous backward of mode OVER_H or FIRST");
  TILEMOE_CHECK(saved.state == TILEMOE_SAVED_DH_OVER_H || saved.dH == args.workspace,
                "mode is REST, which requires the workspace of FIRST, " << saved.dH << ", got "
                                                                        << args.workspace);
  TILEMOE_CHECK(
      !work.wants(TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2 |
                  TILEMOE_GRADIENT_LORA_2),
      "mode is REST, which computes dX, dW1, db1 and those of W1's adapter; ds, dW2, db2 and those "
      "of W2's adapter require another mode");
}

// Whether the saved state is between the parts of a backward that writes dH over H, and this call
// continues it.
void BackwardCall::check_parts() const {
  const int64_t T = routing.spec.T;
  const bool begun = saved.state == TILEMOE_SAVED_PARTS_OF_DH;
  const bool over_H_in_parts = part && args.mode == TILEMOE_BACKWARD_OVER_H;
  TILEMOE_CHECK(!begun || over_H_in_parts,
                "saved has dH over H for "
                    << saved.parts_tokens << " of " << T
                    << " tokens of an incomplete backward; continue with the other parts or run "
                       "forward again");
  if (!over_H_in_parts || !counts_parts()) return;
  const int64_t before = begun ? saved.parts_tokens : 0;
  TILEMOE_CHECK(before >= 0 && part->tokens <= T - before,
                "part has " << part->tokens << " tokens after " << before << " of " << T
                            << ": a part was repeated after H was overwritten; run forward again");
  TILEMOE_CHECK(!part->last || before + part->tokens == T,
                "part is the last, but the parts so far have " << before + part->tokens << " of "
                                                               << T << " tokens");
}

bool BackwardCall::counts_parts() const {
  return args.saved->struct_size >= offsetof(tilemoe_saved, parts_tokens) + sizeof(int64_t);
}

// An element of the addend is read just before that of dX is written.
void BackwardCall::check_memory() const {
  MemoryUse memory;
  memory.writes("dX", args.dX);
  memory.writes("ds", args.ds);
  memory.writes("dweights.W1", gradients.W1);
  memory.writes("dweights.W1_up", gradients.W1_up);
  memory.writes("dweights.W2", gradients.W2);
  memory.writes("dweights.b1", gradients.b1);
  memory.writes("dweights.b1_up", gradients.b1_up);
  memory.writes("dweights.b2", gradients.b2);
  write_lora_memory(memory, lora_gradients);
  memory.reads("saved.P1", saved.P1);
  memory.reads("saved.P2", saved.P2);
  if (args.dry_run == 0) memory.writes("workspace", args.workspace, plan.total);
  memory.reads("X", args.X);
  if (!work.from_dH()) memory.reads("dO", args.dO);
  memory.reads("addend", args.addend, same_view(args.addend, args.dX) ? "dX" : nullptr);
  if (work.dH_over_H && !work.from_dH())
    memory.writes("saved.H", saved.H);
  else
    memory.reads("saved.H", saved.H);
  if (!work.from_dH()) use_fp8_H(memory, experts, routing.spec, saved, work.dH_over_H);
  read_weights_and_routing(memory, weights, routing, part);
  read_quantized_memory(memory, quantized, experts);
  read_lora_memory(memory, lora);
  memory.check();
}

BackwardWork work_of(const tilemoe_workspace_query& query, const tilemoe_experts& experts) {
  TILEMOE_CHECK(query.pass == TILEMOE_PASS_BACKWARD,
                "pass is " << static_cast<int>(query.pass) << ", expected a value in [0, 2]");
  TILEMOE_CHECK(query.mode >= TILEMOE_BACKWARD_WHOLE && query.mode <= TILEMOE_BACKWARD_REST,
                "mode is " << static_cast<int>(query.mode) << ", expected a value in [0, 3]");
  TILEMOE_CHECK((query.gradients & ~BackwardWork::kAll) == 0,
                "gradients is " << query.gradients << ", expected TILEMOE_GRADIENT_ bits");
  const bool rest = query.mode == TILEMOE_BACKWARD_REST;
  const uint32_t limit = rest ? BackwardWork::kFromDH : BackwardWork::kAll;
  TILEMOE_CHECK(
      (query.gradients & ~limit) == 0,
      "gradients is " << query.gradients << ", expected only bits of dX, dW1 and db1 in mode REST");
  const uint32_t frozen = quantized_gradients(experts);
  TILEMOE_CHECK((query.gradients & frozen) == 0,
                "gradients is " << query.gradients << ", expected no bits of quantised weights");
  return {.mode = query.mode,
          .dH_over_H = rest || query.mode == TILEMOE_BACKWARD_OVER_H,
          .gradients = query.gradients ? query.gradients : limit & ~frozen};
}

}  // namespace tilemoe
