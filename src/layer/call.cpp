#include "layer/call.h"

#include <cmath>
#include <utility>

#include "core/activation_kinds.h"
#include "core/check.h"
#include "core/overlap.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

using namespace limits;

bool split(const tilemoe_experts& experts) {
  return experts.gate_layout == TILEMOE_GATE_SPLIT;
}
// Rows of W1 itself: 2n, or n when the up rows have a tensor of their own or there are none.
int64_t w1_rows(const tilemoe_experts& experts) {
  return split(experts) ? experts.n : h_width(experts);
}

// W1 (E, rows, d) or its gradient.
bool contiguous_along_d(const tilemoe_tensor& W1) {
  return W1.stride[2] == 1;
}
const char* contiguous_dimension(const tilemoe_tensor& W1) {
  return contiguous_along_d(W1) ? "d" : "n";
}

void check_activation(const tilemoe_experts& experts) {
  const ActivationKind kind = activation_kind(experts.activation);
  TILEMOE_CHECK(kind.name != nullptr, "activation is " << static_cast<int>(experts.activation)
                                                       << ", which is none of tilemoe_activation");
  TILEMOE_CHECK(
      experts.gate_layout >= TILEMOE_GATE_CONCATENATED && experts.gate_layout <= TILEMOE_GATE_SPLIT,
      "gate_layout is " << static_cast<int>(experts.gate_layout) << ", expected 0 to 2");
  TILEMOE_CHECK(kind.gated || experts.gate_layout == TILEMOE_GATE_CONCATENATED,
                kind.name << " has no gate, so gate_layout must be 0");
  const bool shaped = experts.clamp != 0 || experts.alpha != 0 || experts.up_shift != 0;
  TILEMOE_CHECK(!shaped || experts.activation == TILEMOE_SWIGLU,
                "clamp, alpha and up_shift belong to swiglu, but the activation is " << kind.name);
  TILEMOE_CHECK(std::isfinite(experts.clamp) && experts.clamp >= 0 &&
                    std::isfinite(experts.alpha) && std::isfinite(experts.up_shift),
                "clamp " << experts.clamp << ", alpha " << experts.alpha << ", up_shift "
                         << experts.up_shift << ": expected finite numbers and clamp >= 0");
}

void check_fits(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  TILEMOE_CHECK(experts.device == spec.device,
                "experts are on device " << static_cast<int>(experts.device) << ", the routing on "
                                         << static_cast<int>(spec.device));
  TILEMOE_CHECK(experts.E == spec.E,
                "experts.E is " << experts.E << ", the routing's E is " << spec.E);
}

tilemoe_routing read_routing_of(const tilemoe_routing* given, const tilemoe_experts& experts) {
  const tilemoe_routing routing = read_routing(given);
  check_fits(experts, routing.spec);
  return routing;
}

std::optional<tilemoe_part> read_part(const tilemoe_part* given, const tilemoe_routing_spec& spec) {
  if (given == nullptr) return {};
  const tilemoe_part part = read_struct("part", given);
  check_reserved("part", part.reserved);
  check_flag("part.last", part.last);
  TILEMOE_CHECK(spec.kind != TILEMOE_ROUTING_GROUPED,
                "part is given, and the routing is grouped: its rows have no tokens");
  TILEMOE_CHECK(part.begins != nullptr && part.ends != nullptr,
                "part.begins or part.ends is null, expected (E) int32 of each");
  TILEMOE_CHECK(part.first_token >= 0 && part.first_token <= spec.T && part.tokens >= 0 &&
                    part.tokens <= spec.T - part.first_token,
                "part has " << part.tokens << " tokens from " << part.first_token
                            << " on, expected some of T = " << spec.T);
  return part;
}

void check_weights(const tilemoe_experts& experts, const tilemoe_weights& weights) {
  const DTypes dtype = {experts.dtype};
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const char* not_split = "only the split gate layout has it";
  check_tensor("weights.W1", weights.W1,
               {{E, w1_rows(experts), d}, dtype, Strides::kMatrixEitherMajor});
  check_tensor("weights.W2", weights.W2, {{E, d, n}, dtype, Strides::kMatrixEitherMajor});
  check_optional("weights.b1", weights.b1, {{E, w1_rows(experts)}, dtype, Strides::kRows});
  check_optional("weights.b2", weights.b2, {{E, d}, dtype, Strides::kRows});
  if (!split(experts)) {
    check_absent("weights.W1_up", weights.W1_up, not_split);
    check_absent("weights.b1_up", weights.b1_up, not_split);
    return;
  }
  check_tensor("weights.W1_up", weights.W1_up, {{E, n, d}, dtype, Strides::kMatrixEitherMajor});
  TILEMOE_CHECK(contiguous_along_d(weights.W1) == contiguous_along_d(weights.W1_up),
                "weights.W1 is contiguous along "
                    << contiguous_dimension(weights.W1) << " and weights.W1_up along "
                    << contiguous_dimension(weights.W1_up) << ", expected the same");
  check_optional("weights.b1_up", weights.b1_up, {{E, n}, dtype, Strides::kRows});
  TILEMOE_CHECK(present(weights.b1) == present(weights.b1_up),
                "weights.b1 is " << describe(weights.b1) << " and b1_up is "
                                 << describe(weights.b1_up) << ": give both or neither");
}

// X, O, dO, dX and addends: outer rows of width d.
void check_rows(const char* name, const tilemoe_tensor& tensor, const tilemoe_experts& experts,
                const tilemoe_routing_spec& spec) {
  check_tensor(name, tensor, {{outer_rows(spec), experts.d}, {experts.dtype}, Strides::kRows});
}
void check_optional_rows(const char* name, const tilemoe_tensor& tensor,
                         const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  if (present(tensor)) check_rows(name, tensor, experts, spec);
}

void check_H(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
             const tilemoe_saved& saved) {
  check_reserved("saved", saved.reserved);
  check_tensor("saved.H", saved.H, {{spec.capacity, h_width(experts)}, {experts.dtype}});
}

void check_block_turns(int32_t turns) {
  TILEMOE_CHECK(turns >= 0 && turns <= kMaxBlockTurns,
                "block_turns is " << turns << ", expected 0 to " << kMaxBlockTurns);
}

void read_weights_and_routing(MemoryUse& memory, const tilemoe_weights& weights,
                              const tilemoe_routing& routing,
                              const std::optional<tilemoe_part>& part) {
  memory.reads("weights.W1", weights.W1);
  memory.reads("weights.W1_up", weights.W1_up);
  memory.reads("weights.W2", weights.W2);
  memory.reads("weights.b1", weights.b1);
  memory.reads("weights.b1_up", weights.b1_up);
  memory.reads("weights.b2", weights.b2);
  memory.reads("routing", routing.offsets, routing_bytes(routing.spec));
  if (!part) return;
  const size_t bytes = static_cast<size_t>(routing.spec.E) * sizeof(int32_t);
  memory.reads("part.begins", part->begins, bytes);
  memory.reads("part.ends", part->ends, bytes);
}

}  // namespace

tilemoe_experts read_experts(const tilemoe_experts* given) {
  const tilemoe_experts experts = read_struct("experts", given);
  TILEMOE_CHECK(is_float(experts.dtype), "experts.dtype is "
                                             << tilemoe_dtype_name(experts.dtype)
                                             << ", expected float32, bfloat16 or float16");
  TILEMOE_CHECK(experts.E >= 1 && experts.E <= kMaxExperts,
                "E is " << experts.E << ", expected 1 to " << kMaxExperts);
  for (const auto& [name, width] : {std::pair("d", experts.d), std::pair("n", experts.n)})
    TILEMOE_CHECK(width >= kWidthMultiple && width % kWidthMultiple == 0 && width <= kMaxWidth,
                  name << " is " << width << ", expected a positive multiple of " << kWidthMultiple
                       << ", at most " << kMaxWidth);
  check_activation(experts);
  TILEMOE_CHECK(experts.column_blocks >= 0,
                "column_blocks is " << experts.column_blocks << ", expected at least 0");
  const int64_t matrix = checked_product(h_width(experts), experts.d, "2n * d");
  checked_product(checked_product(experts.E, matrix, "E * 2n * d"), 4, "bytes of W1");
  return experts;
}

tilemoe_routing_spec read_spec(const tilemoe_routing_spec* given, const tilemoe_experts& experts) {
  const tilemoe_routing_spec spec = complete(given);
  check_fits(experts, spec);
  return spec;
}

int64_t outer_rows(const tilemoe_routing_spec& spec) {
  return spec.kind == TILEMOE_ROUTING_GROUPED ? spec.capacity : spec.T;
}

Backend& backend_of(const tilemoe_experts& experts) {
  Backend& backend = backend_for(experts.device);
  backend.check_supported(experts);
  return backend;
}

// ----------------------------------------------------------------- forward

ForwardCall::ForwardCall(const tilemoe_experts* given_experts, const tilemoe_forward_args* given)
    : experts(read_experts(given_experts)),
      args(read_struct("forward args", given)),
      routing(read_routing_of(args.routing, experts)),
      weights(read_struct("weights", args.weights)),
      saved(args.saved ? read_struct("saved", args.saved) : tilemoe_saved{}),
      part(read_part(args.part, routing.spec)),
      backend(backend_of(experts)),
      plan(backend, experts, routing.spec) {
  check_reserved("forward args", args.reserved);
  check_block_turns(args.block_turns);
  check_tensors();
  check_workspace(args.workspace, args.workspace_bytes, plan.total);
  check_memory();
}

void ForwardCall::check_tensors() const {
  check_weights(experts, weights);
  check_rows("X", args.X, experts, routing.spec);
  check_rows("O", args.O, experts, routing.spec);
  check_optional_rows("addend", args.addend, experts, routing.spec);
  if (args.saved) check_H(experts, routing.spec, saved);
  backend.check_limits({experts, routing.spec, weights, args.X, {}, {}});
}

// X has been read when O is written, and an element of the addend just before that of O.
void ForwardCall::check_memory() const {
  MemoryUse memory;
  memory.writes("O", args.O);
  memory.writes("saved.H", saved.H);
  memory.writes("workspace", args.workspace, plan.total);
  memory.reads("X", args.X, "O");
  memory.reads("addend", args.addend, same_view(args.addend, args.O) ? "O" : nullptr);
  read_weights_and_routing(memory, weights, routing, part);
  memory.check();
}

// ---------------------------------------------------------------- backward

BackwardCall::BackwardCall(const tilemoe_experts* given_experts, const tilemoe_backward_args* given)
    : experts(read_experts(given_experts)),
      args(read_struct("backward args", given)),
      routing(read_routing_of(args.routing, experts)),
      weights(read_struct("weights", args.weights)),
      gradients(args.dweights ? read_struct("dweights", args.dweights) : tilemoe_weights{}),
      saved(read_struct("saved", args.saved)),
      part(read_part(args.part, routing.spec)),
      backend(backend_of(experts)),
      work(requested_work()),
      plan(backend, experts, routing.spec, work) {
  check_reserved("backward args", args.reserved);
  check_block_turns(args.block_turns);
  check_flag("accumulate", args.accumulate);
  check_tensors();
  check_mode();
  check_workspace(args.workspace, args.workspace_bytes, plan.total);
  check_memory();
}

BackwardWork BackwardCall::requested_work() const {
  TILEMOE_CHECK(args.mode >= TILEMOE_BACKWARD_WHOLE && args.mode <= TILEMOE_BACKWARD_REST,
                "mode is " << static_cast<int>(args.mode) << ", expected 0 to 3");
  BackwardWork requested{.mode = args.mode};
  requested.dH_over_H =
      args.mode == TILEMOE_BACKWARD_OVER_H ||
      (args.mode == TILEMOE_BACKWARD_REST && saved.state == TILEMOE_SAVED_DH_OVER_H);
  const auto request = [&](const tilemoe_tensor& gradient, uint32_t bit) {
    if (present(gradient)) requested.gradients |= bit;
  };
  request(args.dX, TILEMOE_GRADIENT_X);
  request(args.ds, TILEMOE_GRADIENT_S);
  request(gradients.W1, TILEMOE_GRADIENT_W1);
  request(gradients.W1_up, TILEMOE_GRADIENT_W1_UP);
  request(gradients.W2, TILEMOE_GRADIENT_W2);
  request(gradients.b1, TILEMOE_GRADIENT_B1);
  request(gradients.b1_up, TILEMOE_GRADIENT_B1_UP);
  request(gradients.b2, TILEMOE_GRADIENT_B2);
  return requested;
}

void BackwardCall::check_tensors() const {
  const tilemoe_routing_spec& spec = routing.spec;
  check_weights(experts, weights);
  check_weight_gradients();
  check_H(experts, spec, saved);
  check_rows("X", args.X, experts, spec);
  if (!work.from_dH()) check_rows("dO", args.dO, experts, spec);
  check_optional_rows("dX", args.dX, experts, spec);
  check_optional_rows("addend", args.addend, experts, spec);
  TILEMOE_CHECK(!present(args.addend) || present(args.dX), "addend is given but dX is absent");
  const bool top_k = spec.kind == TILEMOE_ROUTING_TOP_K;
  const TensorRule flat_ds{{spec.pairs}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  const TensorRule top_k_ds{{spec.T, spec.K}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  check_optional("ds", args.ds, top_k && args.ds.ndim == 2 ? top_k_ds : flat_ds);
  backend.check_limits({experts, spec, weights, args.X, args.dO, gradients});
}

void BackwardCall::check_weight_gradients() const {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const DTypes dtypes = {experts.dtype, TILEMOE_FLOAT32};
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
    check_absent("dweights.W1_up", gradients.W1_up, "only the split gate layout has it");
    check_absent("dweights.b1_up", gradients.b1_up, "only the split gate layout has it");
  }
  // With such a W1, H has all gate columns before all up columns.
  if (experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(gradients.W1))
    TILEMOE_CHECK(contiguous_along_d(gradients.W1) || !contiguous_along_d(weights.W1),
                  "dweights.W1 is interleaved and contiguous along 2n, and weights.W1 along d: "
                  "expected dweights.W1 to be contiguous along d, too");
}

// Whether the saved state has what the mode starts from.
void BackwardCall::check_mode() const {
  TILEMOE_CHECK(saved.state >= TILEMOE_SAVED_H && saved.state <= TILEMOE_SAVED_PARTS_OF_DH,
                "saved.state is " << static_cast<int>(saved.state) << ", expected 0 to 3");
  TILEMOE_CHECK(!part || !work.from_dH(), "part is given, and mode is REST, which reads no dO");
  check_parts();
  if (!work.from_dH()) {
    TILEMOE_CHECK(saved.state != TILEMOE_SAVED_DH_OVER_H,
                  "saved was consumed by a backward that wrote dH over H: only mode REST is left; "
                  "run forward again");
    return;
  }
  TILEMOE_CHECK(saved.state != TILEMOE_SAVED_H,
                "mode is REST, but no backward of mode OVER_H or FIRST has left dH");
  TILEMOE_CHECK(saved.state == TILEMOE_SAVED_DH_OVER_H || saved.dH == args.workspace,
                "mode is REST, and dH is in the workspace " << saved.dH << " that FIRST had, but "
                                                            << "this call's is " << args.workspace);
  TILEMOE_CHECK(
      !work.wants(TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_W2 | TILEMOE_GRADIENT_B2),
      "mode is REST, which gives dX, dW1 and db1: ds, dW2 and db2 come from dO, in another mode");
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
                    << " tokens, from a backward that has not ended: call it "
                       "with the other parts, or run forward again");
  if (!over_H_in_parts || !counts_parts()) return;
  const int64_t before = begun ? saved.parts_tokens : 0;
  TILEMOE_CHECK(before >= 0 && part->tokens <= T - before,
                "part has " << part->tokens << " tokens after " << before << " of " << T
                            << ": some part came twice, and H was overwritten; run forward again");
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
  memory.writes("workspace", args.workspace, plan.total);
  memory.reads("X", args.X);
  if (!work.from_dH()) memory.reads("dO", args.dO);
  memory.reads("addend", args.addend, same_view(args.addend, args.dX) ? "dX" : nullptr);
  if (work.dH_over_H && !work.from_dH())
    memory.writes("saved.H", saved.H);
  else
    memory.reads("saved.H", saved.H);
  read_weights_and_routing(memory, weights, routing, part);
  memory.check();
}

BackwardWork work_of(const tilemoe_workspace_query& query) {
  TILEMOE_CHECK(query.pass == TILEMOE_PASS_BACKWARD,
                "pass is " << static_cast<int>(query.pass) << ", expected 0 to 2");
  TILEMOE_CHECK(query.mode >= TILEMOE_BACKWARD_WHOLE && query.mode <= TILEMOE_BACKWARD_REST,
                "mode is " << static_cast<int>(query.mode) << ", expected 0 to 3");
  TILEMOE_CHECK((query.gradients & ~BackwardWork::kAll) == 0,
                "gradients is " << query.gradients << ", expected TILEMOE_GRADIENT_ bits");
  const bool rest = query.mode == TILEMOE_BACKWARD_REST;
  const uint32_t limit = rest ? BackwardWork::kFromDH : BackwardWork::kAll;
  TILEMOE_CHECK((query.gradients & ~limit) == 0,
                "gradients is " << query.gradients
                                << ", expected those of dX, dW1 and db1 alone: mode is REST");
  return {.mode = query.mode,
          .dH_over_H = rest || query.mode == TILEMOE_BACKWARD_OVER_H,
          .gradients = query.gradients ? query.gradients : limit};
}

}  // namespace tilemoe
