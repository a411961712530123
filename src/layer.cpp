#include "layer.h"

#include <algorithm>
#include <cmath>

#include "backend.h"
#include "check.h"
#include "library_limits.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

using namespace limits;

constexpr size_t kRegionAlignment = 256;

bool gated(const tilemoe_experts& experts) {
  return tilemoe_activation_gated(experts.activation) != 0;
}
bool split(const tilemoe_experts& experts) {
  return experts.gate_layout == TILEMOE_GATE_SPLIT;
}
int64_t h_width(const tilemoe_experts& experts) {
  return gated(experts) ? 2 * experts.n : experts.n;
}
// Rows of W1 itself: 2n, or n when the up rows have a tensor of their own or there are none.
int64_t w1_rows(const tilemoe_experts& experts) {
  return split(experts) ? experts.n : h_width(experts);
}

// ------------------------------------------------------------------ checks

void check_experts(const tilemoe_experts* experts) {
  check_struct(experts, "experts");
  TILEMOE_CHECK(is_float(experts->dtype), "experts.dtype is "
                                              << tilemoe_dtype_name(experts->dtype)
                                              << ", expected float32, bfloat16 or float16");
  TILEMOE_CHECK(experts->E >= 1 && experts->E <= kMaxExperts,
                "E is " << experts->E << ", expected 1 to " << kMaxExperts);
  for (const auto& [name, width] : {std::pair("d", experts->d), std::pair("n", experts->n)})
    TILEMOE_CHECK(width >= kWidthMultiple && width % kWidthMultiple == 0 && width <= kMaxWidth,
                  name << " is " << width << ", expected a positive multiple of " << kWidthMultiple
                       << ", at most " << kMaxWidth);
  TILEMOE_CHECK(experts->activation >= TILEMOE_SWIGLU && experts->activation <= TILEMOE_IDENTITY,
                "activation is " << static_cast<int>(experts->activation) << ", expected 0 to 9");
  TILEMOE_CHECK(experts->gate_layout >= TILEMOE_GATE_CONCATENATED &&
                    experts->gate_layout <= TILEMOE_GATE_SPLIT,
                "gate_layout is " << static_cast<int>(experts->gate_layout) << ", expected 0 to 2");
  TILEMOE_CHECK(gated(*experts) || experts->gate_layout == TILEMOE_GATE_CONCATENATED,
                tilemoe_activation_name(experts->activation)
                    << " has no gate, so gate_layout must be 0");
  const bool shaped = experts->clamp != 0 || experts->alpha != 0 || experts->up_shift != 0;
  TILEMOE_CHECK(!shaped || experts->activation == TILEMOE_SWIGLU,
                "clamp, alpha and up_shift belong to swiglu, but the activation is "
                    << tilemoe_activation_name(experts->activation));
  TILEMOE_CHECK(std::isfinite(experts->clamp) && experts->clamp >= 0 &&
                    std::isfinite(experts->alpha) && std::isfinite(experts->up_shift),
                "clamp " << experts->clamp << ", alpha " << experts->alpha << ", up_shift "
                         << experts->up_shift << ": expected finite numbers and clamp >= 0");
  TILEMOE_CHECK(experts->column_blocks >= 0,
                "column_blocks is " << experts->column_blocks << ", expected at least 0");
  const int64_t matrix = checked_product(h_width(*experts), experts->d, "2n * d");
  checked_product(checked_product(experts->E, matrix, "E * 2n * d"), 4, "bytes of W1");
}

void check_same_device(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  TILEMOE_CHECK(experts.device == spec.device,
                "experts are on device " << static_cast<int>(experts.device) << ", the routing on "
                                         << static_cast<int>(spec.device));
  TILEMOE_CHECK(experts.E == spec.E,
                "experts.E is " << experts.E << ", the routing's E is " << spec.E);
}

int64_t outer_rows(const tilemoe_routing_spec& spec) {
  return spec.kind == TILEMOE_ROUTING_GROUPED ? spec.capacity : spec.T;
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
  check_optional("weights.b1_up", weights.b1_up, {{E, n}, dtype, Strides::kRows});
  TILEMOE_CHECK(present(weights.b1) == present(weights.b1_up),
                "weights.b1 is " << describe(weights.b1) << " and b1_up is "
                                 << describe(weights.b1_up) << ": give both or neither");
}

void check_weight_gradients(const tilemoe_experts& experts, const tilemoe_backward_args& args) {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const DTypes dtypes = {experts.dtype, TILEMOE_FLOAT32};
  const tilemoe_weights& grads = args.dweights;
  const TensorRule w1{{E, w1_rows(experts), d}, dtypes, Strides::kMatrixEitherMajor};
  const TensorRule up{{E, n, d}, dtypes, Strides::kMatrixEitherMajor};
  check_optional("dweights.W1", grads.W1, w1);
  check_optional("dweights.W2", grads.W2, {{E, d, n}, dtypes, Strides::kMatrixEitherMajor});
  check_optional("dweights.b1", grads.b1, {{E, w1_rows(experts)}, dtypes, Strides::kRows});
  check_optional("dweights.b2", grads.b2, {{E, d}, dtypes, Strides::kRows});
  if (split(experts)) {
    check_optional("dweights.W1_up", grads.W1_up, up);
    check_optional("dweights.b1_up", grads.b1_up, {{E, n}, dtypes, Strides::kRows});
  } else {
    check_absent("dweights.W1_up", grads.W1_up, "only the split gate layout has it");
    check_absent("dweights.b1_up", grads.b1_up, "only the split gate layout has it");
  }
  TILEMOE_CHECK(args.beta == 0.f || args.beta == 1.f,
                "beta is " << args.beta << ", expected 0 or 1");
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

void check_saved(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                 const tilemoe_saved& saved) {
  check_tensor("saved.H", saved.H, {{spec.capacity, h_width(experts)}, {experts.dtype}});
}

// ------------------------------------------------------------- memory plan

// Regions of the caller's workspace, one after the other.
class Plan {
 public:
  size_t take(size_t bytes) {
    const size_t place = used_;
    used_ = static_cast<size_t>(checked_sum(static_cast<int64_t>(used_),
                                            static_cast<int64_t>(round_up(bytes, kRegionAlignment)),
                                            "workspace"));
    return place;
  }
  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
};

size_t row_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec, int64_t width) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  return static_cast<size_t>(checked_product(
      checked_product(spec.capacity, width, "capacity * width"), element, "workspace"));
}

// Columns of Y that exist at a time.
int64_t output_block_columns(const tilemoe_experts& experts) {
  const int64_t blocks = std::max<int64_t>(experts.column_blocks, 1);
  const int64_t columns = (experts.d + blocks - 1) / blocks;
  return blocks == 1 ? columns : std::min(experts.d, (columns + 63) / 64 * 64);
}

// Those of dX~. Where dH lies over H, the place that A and Y had in the forward pass is dX~'s
// alone: as few blocks as fit there, of whole tiles of 256 if they do.
int64_t input_block_columns(const tilemoe_experts& experts, bool dh_over_h) {
  const int64_t columns = output_block_columns(experts);
  if (columns == experts.d || !dh_over_h) return columns;
  const int64_t room = experts.n + columns;
  const int64_t blocks = (experts.d + room - 1) / room;
  const int64_t least = (experts.d + blocks - 1) / blocks;
  for (int64_t multiple : {256, 64})
    if (const int64_t whole = (least + multiple - 1) / multiple * multiple; whole <= room)
      return std::min(experts.d, whole);
  return columns;
}

// What a step may use while it runs, in a plan of the workspace.
struct ScratchRegion {
  size_t place, size;
};
ScratchRegion take_scratch(Plan& plan, const Backend& backend, const tilemoe_experts& experts,
                           const tilemoe_routing_spec& spec, std::initializer_list<Step> steps) {
  size_t bytes = 0;
  for (Step step : steps)
    bytes = std::max(bytes, backend.scratch_bytes(step, experts, spec.capacity));
  return {plan.take(bytes), bytes};
}
Scratch scratch_at(void* workspace, const ScratchRegion& region) {
  return {static_cast<char*>(workspace) + region.place, region.size};
}

// A lives until the last block of Y is made, a block of Y until the combine.
struct ForwardPlan {
  size_t A, Y, total;
  int64_t block_columns;  // of Y
  ScratchRegion scratch;

  ForwardPlan(const Backend& backend, const tilemoe_experts& experts,
              const tilemoe_routing_spec& spec) {
    Plan plan;
    A = plan.take(row_bytes(experts, spec, experts.n));
    block_columns = output_block_columns(experts);
    Y = plan.take(row_bytes(experts, spec, block_columns));
    scratch =
        take_scratch(plan, backend, experts, spec, {Step::kUpProjection, Step::kDownProjection});
    total = plan.used();
  }
};

// dH lives from the activation gradient to the last step, and on to calls that go on from it:
// nothing else takes its place. In the rest of the workspace one follows the other: A' with the
// partial sums of ds, then with the scratch of dW2; dX~; the scratch of dW1 and of the biases'
// gradients.
struct BackwardPlan {
  size_t dH, A_scaled, dX_rows, ds_partial, total, rest;
  int64_t block_columns;  // of dX~
  ScratchRegion activation_scratch, dW2_scratch, dX_scratch, dW1_scratch, bias_scratch;

  BackwardPlan(const Backend& backend, const tilemoe_experts& experts,
               const tilemoe_routing_spec& spec, bool dh_over_h) {
    const auto scratch_in = [&](Plan& plan, Step step) {
      return take_scratch(plan, backend, experts, spec, {step});
    };
    Plan all;
    dH = dh_over_h ? 0 : all.take(row_bytes(experts, spec, h_width(experts)));
    Plan activation = all;
    A_scaled = activation.take(row_bytes(experts, spec, experts.n));
    Plan dW2 = activation;
    const int64_t partials =
        checked_product(backend.ds_tiles(experts), spec.capacity, "ds partials");
    ds_partial = activation.take(
        static_cast<size_t>(checked_product(partials, sizeof(float), "ds partials")));
    activation_scratch = scratch_in(activation, Step::kActivationGradient);
    dW2_scratch = scratch_in(dW2, Step::kWeightGradient2);
    Plan dX = all;
    block_columns = input_block_columns(experts, dh_over_h);
    dX_rows = dX.take(row_bytes(experts, spec, block_columns));
    dX_scratch = scratch_in(dX, Step::kInputGradient);
    Plan dW1 = all, bias = all;
    dW1_scratch = scratch_in(dW1, Step::kWeightGradient1);
    bias_scratch = scratch_in(bias, Step::kBiasGradient);
    rest = std::max(dW1.used(), bias.used());
    total = std::max({activation.used(), dW2.used(), dX.used(), rest});
  }
};

// A contiguous (capacity, width) tensor in the workspace.
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

// Whether a backward goes on from the dH of an earlier one: it has no dO. Checks that this dH is
// where the call looks for it, and enough for what the call asks for.
bool goes_on_from_dH(const tilemoe_backward_args& args) {
  const tilemoe_saved& saved = *args.saved;
  const bool over_h = args.overwrite_H != 0;
  const bool goes_on = !present(args.dO) && (over_h ? saved.consumed == 1 : saved.consumed == 0);
  TILEMOE_CHECK(
      saved.consumed == 0 || goes_on,
      "saved was consumed by an earlier backward that wrote dH over H; run forward again");
  if (!goes_on) return false;
  if (!over_h) {
    TILEMOE_CHECK(saved.dH_workspace != nullptr || args.workspace == nullptr,
                  "dO is absent, and no earlier backward has kept dH (keep_dH)");
    TILEMOE_CHECK(saved.dH_workspace == args.workspace,
                  "dO is absent, and the dH to go on from is in the workspace "
                      << saved.dH_workspace << ", but the call's is " << args.workspace);
  }
  TILEMOE_CHECK(
      !(present(args.ds) || present(args.dweights.W2) || present(args.dweights.b2)),
      "dO is absent: from the dH of an earlier backward come dX, dW1 and db1, not ds, dW2 and db2");
  return true;
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
          .offsets = routing.offsets,
          .token = routing.row_token,
          .score = routing.row_score};
}

Backend& supported_backend(const tilemoe_experts& experts) {
  Backend& backend = backend_for(experts.device);
  backend.check_supported(experts);
  return backend;
}

}  // namespace

tilemoe_saved_size saved_bytes(const tilemoe_experts* experts,
                               const tilemoe_routing_spec* routing) {
  check_experts(experts);
  const tilemoe_routing_spec spec = complete(routing);
  check_same_device(*experts, spec);
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts->dtype));
  tilemoe_saved_size size{};
  size.rows = static_cast<size_t>(checked_product(
      checked_product(outer_rows(spec), experts->d, "T * d"), element, "bytes of X"));
  size.H = row_bytes(*experts, spec, h_width(*experts));
  size.routing = routing_bytes(spec);
  size.total = size.rows + size.H + size.routing;
  return size;
}

size_t workspace_bytes(const tilemoe_experts* experts, const tilemoe_routing_spec* routing,
                       tilemoe_pass pass) {
  check_experts(experts);
  const tilemoe_routing_spec spec = complete(routing);
  check_same_device(*experts, spec);
  const Backend& backend = supported_backend(*experts);
  switch (pass) {
    case TILEMOE_PASS_INFERENCE:
    case TILEMOE_PASS_FORWARD: return ForwardPlan(backend, *experts, spec).total;
    case TILEMOE_PASS_BACKWARD: return BackwardPlan(backend, *experts, spec, false).total;
    case TILEMOE_PASS_BACKWARD_DH_OVER_H: return BackwardPlan(backend, *experts, spec, true).total;
    case TILEMOE_PASS_BACKWARD_REST: return BackwardPlan(backend, *experts, spec, true).rest;
  }
  TILEMOE_CHECK(false, "pass is " << static_cast<int>(pass) << ", expected 0 to 4");
  return 0;
}

void forward(const tilemoe_experts* experts, const tilemoe_forward_args* args, Backend* steps) {
  check_experts(experts);
  check_struct(args, "forward args");
  check_routing(args->routing);
  const tilemoe_routing& routing = *args->routing;
  const tilemoe_routing_spec& spec = routing.spec;
  check_same_device(*experts, spec);
  Backend& backend = steps ? *steps : supported_backend(*experts);
  check_weights(*experts, args->weights);
  check_rows("X", args->X, *experts, spec);
  check_rows("O", args->O, *experts, spec);
  check_optional_rows("addend", args->addend, *experts, spec);
  if (args->saved) check_saved(*experts, spec, *args->saved);
  const ForwardPlan plan(backend, *experts, spec);
  check_workspace(args->workspace, args->workspace_bytes, plan.total);

  const Scratch scratch = scratch_at(args->workspace, plan.scratch);
  const tilemoe_tensor A = region(*experts, spec, args->workspace, plan.A, experts->n);
  const tilemoe_weights& weights = args->weights;
  const Rows rows = rows_of(routing);

  if (spec.capacity > 0)
    backend.up_projection({.experts = experts,
                           .rows = rows,
                           .X = args->X,
                           .weights = {weights.W1, weights.W1_up, weights.b1, weights.b1_up},
                           .H = args->saved ? args->saved->H : tilemoe_tensor{},
                           .A = A,
                           .scratch = scratch,
                           .stream = args->stream});
  for_each_block(experts->d, plan.block_columns, [&](int64_t first, int64_t columns) {
    const tilemoe_tensor Y = region(*experts, spec, args->workspace, plan.Y, columns);
    if (spec.capacity > 0)
      backend.down_projection({.experts = experts,
                               .rows = rows,
                               .A = A,
                               .W2 = slice(weights.W2, 1, first, columns),
                               .b2 = slice(weights.b2, 1, first, columns),
                               .Y = Y,
                               .scratch = scratch,
                               .stream = args->stream});
    backend.combine({.experts = experts,
                     .routing = &routing,
                     .row_values = Y,
                     .scale_by_score = true,
                     .addend = slice(args->addend, 1, first, columns),
                     .out = slice(args->O, 1, first, columns),
                     .stream = args->stream});
  });
  if (args->saved) args->saved->consumed = 0, args->saved->dH_workspace = nullptr;
}

void backward(const tilemoe_experts* experts, const tilemoe_backward_args* args, Backend* steps) {
  check_experts(experts);
  check_struct(args, "backward args");
  check_routing(args->routing);
  const tilemoe_routing& routing = *args->routing;
  const tilemoe_routing_spec& spec = routing.spec;
  check_same_device(*experts, spec);
  Backend& backend = steps ? *steps : supported_backend(*experts);
  const tilemoe_weights& weights = args->weights;
  const tilemoe_weights& grads = args->dweights;
  check_weights(*experts, weights);
  check_weight_gradients(*experts, *args);
  backend.check_gradients(*experts, weights, grads);
  TILEMOE_CHECK(args->saved != nullptr, "saved is null: backward needs the H that forward wrote");
  check_saved(*experts, spec, *args->saved);
  const bool over_h = args->overwrite_H != 0;
  const bool goes_on = goes_on_from_dH(*args);
  check_rows("X", args->X, *experts, spec);
  if (!goes_on) check_rows("dO", args->dO, *experts, spec);
  check_optional_rows("dX", args->dX, *experts, spec);
  check_optional_rows("addend", args->addend, *experts, spec);
  TILEMOE_CHECK(!present(args->addend) || present(args->dX), "addend is given but dX is absent");
  const bool top_k = spec.kind == TILEMOE_ROUTING_TOP_K;
  const TensorRule flat_ds{{spec.pairs}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  const TensorRule top_k_ds{{spec.T, spec.K}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  check_optional("ds", args->ds, top_k && args->ds.ndim == 2 ? top_k_ds : flat_ds);
  const BackwardPlan plan(backend, *experts, spec, over_h);
  const bool only_rest = goes_on && over_h && !present(args->dX);
  check_workspace(args->workspace, args->workspace_bytes, only_rest ? plan.rest : plan.total);

  char* base = static_cast<char*>(args->workspace);
  const Rows rows = rows_of(routing);
  const bool accumulate = args->beta != 0;
  const bool wants_dW1 = present(grads.W1) || present(grads.W1_up);
  const bool wants_db1 = present(grads.b1) || present(grads.b1_up);
  const bool wants_dW2 = present(grads.W2);
  const bool wants_ds = present(args->ds);
  const bool any_rows = spec.capacity > 0;  // without one, sums over rows are zeros all the same
  const bool keeps_dH = args->keep_dH != 0;
  const bool wants_dH = present(args->dX) || wants_dW1 || wants_db1 || keeps_dH;
  const tilemoe_tensor dH =
      over_h ? args->saved->H : region(*experts, spec, base, plan.dH, h_width(*experts));
  const tilemoe_tensor A_scaled = region(*experts, spec, base, plan.A_scaled, experts->n);
  float* ds_partial = reinterpret_cast<float*>(base + plan.ds_partial);

  if (any_rows && !goes_on && (wants_dH || wants_dW2 || wants_ds))
    backend.activation_gradient({.experts = experts,
                                 .rows = rows,
                                 .dO = args->dO,
                                 .W1 = weights.W1,
                                 .W2 = weights.W2,
                                 .H = args->saved->H,
                                 .dH = wants_dH ? dH : tilemoe_tensor{},
                                 .A_scaled = wants_dW2 ? A_scaled : tilemoe_tensor{},
                                 .ds_partial = wants_ds ? ds_partial : nullptr,
                                 .scratch = scratch_at(base, plan.activation_scratch),
                                 .stream = args->stream});
  if (over_h && wants_dH) args->saved->consumed = 1;
  if (!goes_on) args->saved->dH_workspace = keeps_dH && !over_h ? base : nullptr;
  if (wants_ds)
    backend.score_gradient({.experts = experts,
                            .routing = &routing,
                            .ds_partial = ds_partial,
                            .ds_tiles = backend.ds_tiles(*experts),
                            .dO = args->dO,
                            .b2 = weights.b2,
                            .ds = static_cast<float*>(args->ds.data),
                            .stream = args->stream});
  if (wants_dW2)
    backend.weight_gradient_2({.experts = experts,
                               .rows = rows,
                               .dO = args->dO,
                               .A_scaled = A_scaled,
                               .dW2 = grads.W2,
                               .accumulate = accumulate,
                               .scratch = scratch_at(base, plan.dW2_scratch),
                               .stream = args->stream});
  if (present(args->dX))
    for_each_block(experts->d, plan.block_columns, [&](int64_t first, int64_t columns) {
      const tilemoe_tensor dX_rows = region(*experts, spec, base, plan.dX_rows, columns);
      if (any_rows)
        backend.input_gradient({.experts = experts,
                                .rows = rows,
                                .dH = dH,
                                .weights = {slice(weights.W1, 2, first, columns),
                                            slice(weights.W1_up, 2, first, columns),
                                            {},
                                            {}},
                                .dX_rows = dX_rows,
                                .scratch = scratch_at(base, plan.dX_scratch),
                                .stream = args->stream});
      backend.combine({.experts = experts,
                       .routing = &routing,
                       .row_values = dX_rows,
                       .scale_by_score = false,
                       .addend = slice(args->addend, 1, first, columns),
                       .out = slice(args->dX, 1, first, columns),
                       .stream = args->stream});
    });
  if (wants_dW1)
    backend.weight_gradient_1({.experts = experts,
                               .rows = rows,
                               .W1 = weights.W1,
                               .dH = dH,
                               .X = args->X,
                               .dW1 = grads.W1,
                               .dW1_up = grads.W1_up,
                               .accumulate = accumulate,
                               .scratch = scratch_at(base, plan.dW1_scratch),
                               .stream = args->stream});
  if (wants_db1 || present(grads.b2))
    backend.bias_gradient({.experts = experts,
                           .rows = rows,
                           .dO = args->dO,
                           .db2 = grads.b2,
                           .W1 = weights.W1,
                           .dH = wants_db1 ? dH : tilemoe_tensor{},
                           .db1 = grads.b1,
                           .db1_up = grads.b1_up,
                           .accumulate = accumulate,
                           .scratch = scratch_at(base, plan.bias_scratch),
                           .stream = args->stream});
}

}  // namespace tilemoe
