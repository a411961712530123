#include "layer/layer.h"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "core/backend.h"
#include "core/check.h"
#include "layer/call.h"
#include "layer/workspace.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

Scratch scratch_at(void* workspace, const ScratchRegion& region) {
  return {static_cast<char*>(workspace) + region.place, region.size};
}

// A contiguous (capacity, width) matrix in the workspace.
tilemoe_tensor region(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                      void* workspace, size_t place, int64_t width) {
  tilemoe_tensor tensor{};
  tensor.data = static_cast<char*>(workspace) + place;
  tensor.dtype = experts.dtype;
  tensor.ndim = 2;
  tensor.shape[0] = spec.capacity, tensor.shape[1] = width;
  tensor.stride[0] = width, tensor.stride[1] = 1;
  return tensor;
}

// Indices [first, first + count) of a dimension; what is absent stays so.
tilemoe_tensor slice(tilemoe_tensor tensor, int dimension, int64_t first, int64_t count) {
  if (!present(tensor)) return tensor;
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype));
  tensor.data = static_cast<char*>(tensor.data) + first * tensor.stride[dimension] * element;
  tensor.shape[dimension] = count;
  return tensor;
}

// Calls body(first, columns) for each block of so many of d's columns.
template <class Body>
void for_each_block(int64_t d, int64_t columns, const Body& body) {
  for (int64_t first = 0; first < d; first += columns) body(first, std::min(columns, d - first));
}

Rows rows_of(const tilemoe_routing& routing) {
  return {.E = routing.spec.E,
          .capacity = routing.spec.capacity,
          .of_an_expert = rows_of_an_expert(routing.spec),
          .offsets = routing.offsets,
          .token = routing.row_token,
          .score = routing.row_score};
}

// A part's, for the steps that have a row of output per row.
Rows rows_of(const tilemoe_routing& routing, const std::optional<tilemoe_part>& part) {
  Rows rows = rows_of(routing);
  if (part) rows.offsets = part->begins, rows.ends = part->ends;
  return rows;
}

// The routing as a combine of the part's tokens sees it.
tilemoe_routing routing_of(tilemoe_routing routing, const std::optional<tilemoe_part>& part) {
  if (!part) return routing;
  routing.spec.T = part->tokens;
  if (routing.token_offsets != nullptr)
    routing.token_offsets += part->first_token;
  else
    routing.pair_row += part->first_token * routing.spec.K;
  return routing;
}

// A part's tokens of (T, d), or of a block of its columns.
tilemoe_tensor tokens_of(const tilemoe_tensor& tensor, const std::optional<tilemoe_part>& part) {
  return part ? slice(tensor, 0, part->first_token, part->tokens) : tensor;
}

// Up to here a product lasts little longer than its launch. 64 tokens of 32 experts each.
constexpr int64_t kSmallT = 2048;

Tuning tuning_of(int32_t block_turns) {
  return {.ctas_per_sm = std::max<int>(block_turns, 1)};
}
Tuning forward_tuning(const tilemoe_forward_args& args, const tilemoe_routing_spec& spec) {
  Tuning tuning = tuning_of(args.block_turns);
  tuning.pdl = spec.capacity <= kSmallT;
  return tuning;
}

// Runs a backend's steps, seen by the observer if there is one.
class StepRunner {
 public:
  StepRunner(Backend& backend, StepObserver* observer) : backend_(backend), observer_(observer) {}

  template <class Args>
  void operator()(const char* name, void (Backend::*step)(const Args&),
                  const std::type_identity_t<Args>& args) const {
    if (observer_) observer_->begin(name);
    (backend_.*step)(args);
    if (observer_) observer_->end(name);
  }

 private:
  Backend& backend_;
  StepObserver* observer_;
};

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
        dH_(call.work.dH_over_H ? call.saved.H
                                : region(call.experts, call.routing.spec, base_, call.plan.dH,
                                         h_width(call.experts))),
        A_scaled_(
            region(call.experts, call.routing.spec, base_, call.plan.A_scaled, call.experts.n)),
        ds_partial_(reinterpret_cast<float*>(base_ + call.plan.ds_partial)),
        accumulate_(call.args.accumulate != 0),
        tuning_(tuning_of(call.args.block_turns)) {}

  // dH, A' and the partial sums of ds, as far as they are asked for.
  void activation_gradient() const {
    if (!any_rows_ || !call_.work.needs_activation_gradient()) return;
    run_(step::kActivationGradient, &Backend::activation_gradient,
         {.experts = experts_,
          .rows = rows_of(call_.routing, call_.part),
          .dO = call_.args.dO,
          .W1 = call_.weights.W1,
          .W2 = call_.weights.W2,
          .H = call_.saved.H,
          .dH = call_.work.needs_dH() ? dH_ : tilemoe_tensor{},
          .A_scaled = wants(TILEMOE_GRADIENT_W2) ? A_scaled_ : tilemoe_tensor{},
          .ds_partial = wants(TILEMOE_GRADIENT_S) ? ds_partial_ : nullptr,
          .scratch = scratch_at(base_, call_.plan.activation_scratch),
          .stream = call_.args.stream,
          .tuning = tuning_});
  }

  void score_gradient() const {
    if (!wants(TILEMOE_GRADIENT_S)) return;
    run_(step::kScoreGradient, &Backend::score_gradient,
         {.experts = experts_,
          .routing = &call_.routing,
          .ds_partial = ds_partial_,
          .dO = call_.args.dO,
          .b2 = call_.weights.b2,
          .ds = static_cast<float*>(call_.args.ds.data),
          .stream = call_.args.stream});
  }

  // Sums over rows are zeros where there are no rows, here and below.
  void weight_gradient_2() const {
    if (!wants(TILEMOE_GRADIENT_W2)) return;
    run_(step::kWeightGradient2, &Backend::weight_gradient_2,
         {.experts = experts_,
          .rows = rows_,
          .dO = call_.args.dO,
          .A_scaled = A_scaled_,
          .dW2 = call_.gradients.W2,
          .accumulate = accumulate_,
          .scratch = scratch_at(base_, call_.plan.dW2_scratch),
          .stream = call_.args.stream,
          .tuning = tuning_});
  }

  void input_gradient() const {
    if (!wants(TILEMOE_GRADIENT_X)) return;
    for_each_block(call_.experts.d, call_.plan.block_columns, [&](int64_t first, int64_t columns) {
      const tilemoe_tensor dX_rows =
          region(call_.experts, call_.routing.spec, base_, call_.plan.dX_rows, columns);
      if (any_rows_)
        run_(step::kInputGradient, &Backend::input_gradient,
             {.experts = experts_,
              .rows = rows_,
              .dH = dH_,
              .weights = {slice(call_.weights.W1, 2, first, columns),
                          slice(call_.weights.W1_up, 2, first, columns),
                          {},
                          {}},
              .dX_rows = dX_rows,
              .scratch = scratch_at(base_, call_.plan.dX_scratch),
              .stream = call_.args.stream,
              .tuning = tuning_});
      run_(step::kCombineGradient, &Backend::combine,
           {.experts = experts_,
            .routing = &call_.routing,
            .row_values = dX_rows,
            .scale_by_score = false,
            .addend = slice(call_.args.addend, 1, first, columns),
            .out = slice(call_.args.dX, 1, first, columns),
            .stream = call_.args.stream});
    });
  }

  void weight_gradient_1() const {
    if (!wants(TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP)) return;
    run_(step::kWeightGradient1, &Backend::weight_gradient_1,
         {.experts = experts_,
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

  void bias_gradient() const {
    const bool db1 = wants(TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP);
    if (!db1 && !wants(TILEMOE_GRADIENT_B2)) return;
    run_(step::kBiasGradient, &Backend::bias_gradient,
         {.experts = experts_,
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

  const BackwardCall& call_;
  const StepRunner run_;
  const tilemoe_experts* experts_;
  const Rows rows_;
  const bool any_rows_;
  char* const base_;  // of the workspace
  const tilemoe_tensor dH_, A_scaled_;
  float* const ds_partial_;
  const bool accumulate_;
  const Tuning tuning_;
};

// Before the first kernel that writes dH over H: if the call fails, or parts are still to come, H is
// neither what forward wrote nor dH.
void begin_over_H(const BackwardCall& call, tilemoe_saved& saved) {
  if (call.args.mode != TILEMOE_BACKWARD_OVER_H) return;
  if (call.counts_parts()) {
    if (saved.state != TILEMOE_SAVED_PARTS_OF_DH) saved.parts_tokens = 0;
    saved.parts_tokens += call.part ? call.part->tokens : call.routing.spec.T;
  }
  saved.state = TILEMOE_SAVED_PARTS_OF_DH, saved.dH = nullptr;
}

// What a backward leaves for the next call.
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

tilemoe_saved_size saved_bytes(const tilemoe_experts* given_experts,
                               const tilemoe_routing_spec* routing) {
  const tilemoe_experts experts = read_experts(given_experts);
  const tilemoe_routing_spec spec = read_spec(routing, experts);
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  tilemoe_saved_size size{};
  size.rows = static_cast<size_t>(checked_product(
      checked_product(outer_rows(spec), experts.d, "T * d"), element, "bytes of X"));
  size.H = row_bytes(experts, spec, h_width(experts));
  size.routing = routing_bytes(spec);
  size.total = size.rows + size.H + size.routing;
  return size;
}

size_t workspace_bytes(const tilemoe_workspace_query* given) {
  const tilemoe_workspace_query query = read_struct("query", given);
  check_reserved("query", query.reserved);
  const tilemoe_experts experts = read_experts(query.experts);
  const tilemoe_routing_spec spec = read_spec(query.routing, experts);
  const Backend& backend = backend_of(experts);
  if (query.pass == TILEMOE_PASS_INFERENCE || query.pass == TILEMOE_PASS_FORWARD) {
    TILEMOE_CHECK(query.mode == 0 && query.gradients == 0,
                  "mode is " << static_cast<int>(query.mode) << " and gradients " << query.gradients
                             << ", expected 0: the pass is not backward");
    return ForwardPlan(backend, experts, spec).total;
  }
  return BackwardPlan(backend, experts, spec, work_of(query)).total;
}

void forward(const tilemoe_experts* experts, const tilemoe_forward_args* given,
             StepObserver* observer) {
  const ForwardCall call(experts, given);
  const StepRunner run(call.backend, observer);
  const tilemoe_forward_args& args = call.args;
  const tilemoe_routing_spec& spec = call.routing.spec;
  const Scratch scratch = scratch_at(args.workspace, call.plan.scratch);
  const tilemoe_tensor A = region(call.experts, spec, args.workspace, call.plan.A, call.experts.n);
  const tilemoe_weights& weights = call.weights;
  const Rows rows = rows_of(call.routing, call.part);
  const tilemoe_routing routing = routing_of(call.routing, call.part);
  const Tuning tuning = forward_tuning(args, spec);

  if (spec.capacity > 0)
    run(step::kUpProjection, &Backend::up_projection,
        {.experts = &call.experts,
         .rows = rows,
         .X = args.X,
         .weights = {weights.W1, weights.W1_up, weights.b1, weights.b1_up},
         .H = call.saved.H,
         .A = A,
         .scratch = scratch,
         .stream = args.stream,
         .tuning = tuning});
  for_each_block(call.experts.d, call.plan.block_columns, [&](int64_t first, int64_t columns) {
    const tilemoe_tensor Y = region(call.experts, spec, args.workspace, call.plan.Y, columns);
    if (spec.capacity > 0)
      run(step::kDownProjection, &Backend::down_projection,
          {.experts = &call.experts,
           .rows = rows,
           .A = A,
           .W2 = slice(weights.W2, 1, first, columns),
           .b2 = slice(weights.b2, 1, first, columns),
           .Y = Y,
           .scratch = scratch,
           .stream = args.stream,
           .tuning = tuning});
    run(step::kCombine, &Backend::combine,
        {.experts = &call.experts,
         .routing = &routing,
         .row_values = Y,
         .scale_by_score = true,
         .addend = tokens_of(slice(args.addend, 1, first, columns), call.part),
         .out = tokens_of(slice(args.O, 1, first, columns), call.part),
         .stream = args.stream,
         .tuning = tuning});
  });
  if (args.saved) args.saved->state = TILEMOE_SAVED_H, args.saved->dH = nullptr;
}

// In this order dX~ is gone before the scratch of dW1 is used.
void backward(const tilemoe_experts* experts, const tilemoe_backward_args* given,
              StepObserver* observer) {
  const BackwardCall call(experts, given);
  const BackwardSteps run(call, observer);
  begin_over_H(call, *call.args.saved);
  run.activation_gradient();
  if (call.part && !call.part->last) return;  // the other steps are of all rows
  update_saved(call, *call.args.saved);
  run.score_gradient();
  run.weight_gradient_2();
  run.input_gradient();
  run.weight_gradient_1();
  run.bias_gradient();
}

}  // namespace tilemoe
