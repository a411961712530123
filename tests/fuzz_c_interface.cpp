// The calls that the fuzzer makes: sizes from any numbers; then, over a small problem, a routing,
// its layer forward and backward, and the router.
#include <algorithm>
#include <cmath>

#include "core/activation_kinds.h"
#include "fuzz_call.h"

namespace tilemoe::fuzz {
namespace {

int64_t any_number(Choices& choices) {
  switch (choices.below(4)) {
    case 0: return choices.between(-2, 40);
    case 1: return int64_t{1} << choices.below(63);
    case 2: return (int64_t{1} << choices.below(63)) - choices.between(-1, 2);
    default: return choices.pick<int64_t>({0, -1, INT32_MAX, INT64_MAX, INT64_MIN});
  }
}

void require(bool condition, const char* what) {
  if (!condition)
    throw Finding(std::string(what) + " (last error: '" + tilemoe_last_error() + "')");
}

// A refused size query leaves the number unchanged and reports the reason.
void check_size(World& world, tilemoe_status status, bool untouched) {
  ++world.statistics.sizes;
  if (status == TILEMOE_SUCCESS) return;
  require(status == TILEMOE_INVALID_ARGUMENT || status == TILEMOE_UNSUPPORTED, "size: status");
  require(untouched, "size: written, though refused");
  require(*tilemoe_last_error() != '\0', "size: refused without a word");
}

// A size that no struct has: memory behind a struct is not read.
uint64_t no_size(Choices& choices, uint64_t size) {
  const auto any = static_cast<uint64_t>(any_number(choices));
  return any < size ? any : UINT64_MAX - any % 4096;
}

void fuzz_sizes(World& world, Choices& choices) {
  tilemoe_routing_spec spec{};
  spec.struct_size = choices.one_in(10) ? no_size(choices, sizeof spec) : sizeof spec;
  spec.device = static_cast<tilemoe_device>(choices.one_in(10) ? any_number(choices) : 0);
  spec.kind = static_cast<tilemoe_routing_kind>(choices.between(-1, 4));
  spec.T = any_number(choices), spec.E = any_number(choices), spec.K = any_number(choices);
  spec.pairs = any_number(choices), spec.capacity = any_number(choices);
  spec.m = any_number(choices);
  if (choices.one_in(3)) spec.round_tokens = any_number(choices);
  spec.rounding = static_cast<tilemoe_rounding>(choices.between(-1, 5));
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = spec.device;
  experts.dtype = static_cast<tilemoe_dtype>(choices.between(-1, 5));
  experts.d = any_number(choices), experts.n = any_number(choices);
  experts.E = choices.one_in(4) ? any_number(choices) : spec.E;
  experts.activation = static_cast<tilemoe_activation>(choices.between(-1, kActivationCount));
  experts.gate_layout = static_cast<tilemoe_gate_layout>(choices.between(-1, 3));
  if (choices.one_in(3)) {
    experts.rank_1 = static_cast<int32_t>(any_number(choices));
    experts.rank_2 = static_cast<int32_t>(8 * choices.between(-1, 33));
  }
  if (choices.one_in(3)) {
    experts.format_1 = static_cast<tilemoe_format>(choices.between(-1, 6));
    experts.format_2 = static_cast<tilemoe_format>(choices.between(-1, 6));
    experts.format_H = static_cast<tilemoe_format>(choices.between(-1, 6));
    experts.recipe = static_cast<tilemoe_recipe>(choices.between(-1, 4));
    experts.weight_blocks = static_cast<int32_t>(any_number(choices));
  }

  int64_t capacity = -7;
  check_size(world, tilemoe_routing_capacity(&spec, &capacity), capacity == -7);
  size_t bytes = 7;
  check_size(world, tilemoe_routing_bytes(&spec, &bytes), bytes == 7);
  bytes = 7;
  check_size(world, tilemoe_routing_workspace_bytes(&spec, &bytes), bytes == 7);
  bytes = 7;
  tilemoe_workspace_query query{};
  query.struct_size = choices.one_in(10) ? no_size(choices, sizeof query) : sizeof query;
  query.experts = &experts, query.routing = &spec;
  query.pass = static_cast<tilemoe_pass>(choices.between(-1, 3));
  query.mode = static_cast<tilemoe_backward_mode>(choices.between(-1, 4));
  query.gradients = static_cast<uint32_t>(choices.below(300));
  if (choices.one_in(10)) query.cuda_sms = static_cast<int32_t>(any_number(choices));
  check_size(world, tilemoe_workspace_bytes(&query, &bytes), bytes == 7);
  bytes = 7;
  check_size(world, tilemoe_route_tokens_workspace_bytes(&spec, any_number(choices), &bytes),
             bytes == 7);
  bytes = 7;
  check_size(
      world,
      tilemoe_router_logits_workspace_bytes(spec.device, spec.T, spec.E, any_number(choices),
                                            choices.pick({TILEMOE_FLOAT32, TILEMOE_INT32}), &bytes),
      bytes == 7);
  bytes = 7;
  check_size(world, tilemoe_router_losses_workspace_bytes(spec.device, spec.T, spec.E, &bytes),
             bytes == 7);
  size_t packed_bytes = 7;
  check_size(world, tilemoe_packed_lora_bytes(&experts, &packed_bytes), packed_bytes == 7);
  tilemoe_weights weights{};
  weights.struct_size = choices.one_in(10) ? no_size(choices, sizeof weights) : sizeof weights;
  tilemoe_packed_lora packed{};
  packed.struct_size = sizeof packed, packed.A1.ndim = 7;
  check_size(world,
             tilemoe_packed_lora_bind(&experts, &weights, nullptr,
                                      static_cast<size_t>(any_number(choices)), &packed),
             packed.A1.ndim == 7);
  tilemoe_saved_size saved{sizeof saved, 7, 7, 7, 7, 7, 7, 7};
  check_size(world, tilemoe_saved_bytes(&experts, &spec, &saved), saved.total == 7);
}

tilemoe_dtype any_float(Choices& choices) {
  return choices.pick({TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16});
}
tilemoe_dtype any_integer(Choices& choices) {
  return choices.pick({TILEMOE_INT32, TILEMOE_INT64});
}

// A small problem: its specification, and the routing built for it.
class Problem {
 public:
  Problem(World& world, Choices& choices) : world_(world), choices_(choices) {
    spec_.struct_size = sizeof spec_;
    spec_.kind = static_cast<tilemoe_routing_kind>(choices.below(4));
    spec_.E = choices.between(1, 5);
    if (spec_.kind != TILEMOE_ROUTING_GROUPED) spec_.T = choices.between(0, 8);
    if (spec_.kind == TILEMOE_ROUTING_TOP_K || spec_.kind == TILEMOE_ROUTING_ROUNDED)
      spec_.K = choices.between(1, spec_.E);
    if (spec_.kind == TILEMOE_ROUTING_GENERAL) spec_.pairs = choices.between(0, 12);
    if (spec_.kind == TILEMOE_ROUTING_GROUPED || choices.one_in(3))
      spec_.capacity = choices.between(0, 12);
    if (spec_.kind == TILEMOE_ROUTING_ROUNDED) {
      spec_.m = choices.between(1, 5);
      spec_.rounding = static_cast<tilemoe_rounding>(choices.below(5));
      if (choices.one_in(2)) {  // groups: of up to 4 tokens
        spec_.round_tokens = choices.between(1, 4);
        spec_.T = spec_.T / spec_.round_tokens * spec_.round_tokens;
      }
    }
    size_t bytes = 0;
    check(tilemoe_routing_bytes(&spec_, &bytes));
    unsigned char* memory = world.routing.place(bytes, 16, choices.one_in(2));
    std::fill_n(world.routing.begin(), world.routing.bytes(), static_cast<unsigned char>(0x5A));
    routing_.struct_size = sizeof routing_;
    check(tilemoe_routing_bind(&spec_, memory, bytes, &routing_));
    check(tilemoe_routing_workspace_bytes(&spec_, &routing_workspace_));
  }

  bool build_routing();
  bool route_tokens(Call& call, tilemoe_routing& routing);
  void choose();
  void layer();
  void gemms();
  void router_backward();
  void losses();
  void logits();
  void sum_rows();

 private:
  void check(tilemoe_status status) const { require(status == TILEMOE_SUCCESS, "a good problem"); }
  void check_routing() const;
  void struct_size_hazard(Call& call, uint64_t& size);
  void routing_hazards(Call& call, tilemoe_routing& routing);
  void experts_hazards(Call& call, tilemoe_experts& experts);
  void weights(Call& call, const tilemoe_experts& experts, tilemoe_weights& weights);
  void gradients(Call& call, const tilemoe_experts& experts, const tilemoe_weights& weights,
                 tilemoe_weights& gradients, bool accumulate);
  void lora(Call& call, const tilemoe_experts& experts, const tilemoe_weights& weights,
            tilemoe_packed_lora& lora);
  void lora_gradients(Call& call, const tilemoe_experts& experts, const tilemoe_packed_lora& lora,
                      tilemoe_lora& gradients);
  bool forward(const tilemoe_experts& experts);
  bool backward(const tilemoe_experts& experts);
  template <class Args, class Fill>
  void gemm(const char* name, tilemoe_mm mm, const tilemoe_experts& experts,
            tilemoe_status (*entry)(const tilemoe_experts*, const Args*), const Fill& fill);
  size_t layer_workspace(const tilemoe_experts& experts, tilemoe_pass pass,
                         tilemoe_backward_mode mode = TILEMOE_BACKWARD_WHOLE) const {
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec_, query.pass = pass, query.mode = mode;
    size_t bytes = 0;
    check(tilemoe_workspace_bytes(&query, &bytes));
    return bytes;
  }
  int64_t outer_rows() const {
    return spec_.kind == TILEMOE_ROUTING_GROUPED ? routing_.spec.capacity : spec_.T;
  }

  World& world_;
  Choices& choices_;
  tilemoe_routing_spec spec_{};
  tilemoe_routing routing_{};
  size_t routing_workspace_ = 0;
};

void Problem::struct_size_hazard(Call& call, uint64_t& size) {
  call.hazard([&size, none = no_size(choices_, size)] { size = none; });
}

void Problem::routing_hazards(Call& call, tilemoe_routing& routing) {
  call.hazard([&routing] { routing.struct_size = 3; });
  call.hazard([&routing] { routing.offsets = nullptr; });
  call.hazard([&routing] { routing.row_score = nullptr; });
  call.hazard([&routing] { routing.spec.capacity += 64; });
  call.hazard([&routing] { routing.spec.E += 64; });
  call.hazard([&routing] { routing.spec.T = -1; });
  call.hazard([&routing] { routing.spec.device = TILEMOE_CUDA; });
  call.hazard([&routing, kind = choices_.between(-1, 4)] {
    routing.spec.kind = static_cast<tilemoe_routing_kind>(kind);
  });
}

// The invariants of a built routing, whatever it was built from.
void Problem::check_routing() const {
  const int64_t E = spec_.E, capacity = routing_.spec.capacity;
  require(routing_.offsets[0] == 0, "routing: offsets start at 0");
  for (int64_t e = 0; e < E; ++e)
    require(routing_.offsets[e] <= routing_.offsets[e + 1], "routing: offsets ascend");
  const int64_t M = routing_.offsets[E];
  require(M <= capacity, "routing: rows fit the capacity");
  if (spec_.kind == TILEMOE_ROUTING_GROUPED) return;
  int64_t rows = 0;
  const int64_t pairs =
      routing_.token_offsets ? routing_.token_offsets[spec_.T] : routing_.spec.pairs;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    require(routing_.pair_row[pair] >= -1 && routing_.pair_row[pair] < M, "routing: rows of pairs");
    rows += routing_.pair_row[pair] >= 0;
  }
  require(rows == M, "routing: as many pairs as rows");
  for (int64_t row = 0; row < M; ++row)
    require(routing_.row_token[row] >= 0 && routing_.row_token[row] < spec_.T, "routing: tokens");
}

bool Problem::route_tokens(Call& call, tilemoe_routing& routing) {
  tilemoe_route_tokens_args args{};
  args.struct_size = sizeof args;
  args.scoring = static_cast<tilemoe_scoring>(choices_.below(5));
  args.logits_dtype = any_float(choices_);
  const int64_t d = 8 * choices_.between(1, 70);
  const tilemoe_dtype dtype = any_float(choices_);
  call.input(args.X, dtype, {spec_.T, d}, Layout::kRows, true);
  call.input(args.router_weight, choices_.one_in(2) ? dtype : TILEMOE_FLOAT32, {spec_.E, d},
             Layout::kRows, true);
  if (choices_.one_in(2)) call.input(args.router_bias, any_float(choices_), {spec_.E});
  if (args.scoring >= TILEMOE_SIGMOID && choices_.one_in(2))
    call.input(args.selection_bias, TILEMOE_FLOAT32, {spec_.E});
  if (choices_.one_in(2)) call.output(args.logits, args.logits_dtype, {spec_.T, spec_.E});
  if (choices_.one_in(2)) call.output(args.expert_counts, TILEMOE_INT32, {spec_.E});
  size_t bytes = 0;
  check(tilemoe_route_tokens_workspace_bytes(&spec_, d, &bytes));
  call.workspace(args.workspace, args.workspace_bytes, bytes);
  call.may_overflow();
  struct_size_hazard(call, args.struct_size);
  call.hazard([&args, dtype = choices_.between(-1, 5)] {
    args.logits_dtype = static_cast<tilemoe_dtype>(dtype);
  });
  call.hazard([&args, n_group = any_number(choices_)] { args.n_group = n_group; });
  return call.run([&] { return tilemoe_route_tokens(&routing, &args); });
}

bool Problem::build_routing() {
  Call call(world_, choices_, "build");
  call.builds_routing();
  tilemoe_routing routing = routing_;
  routing_hazards(call, routing);
  bool built = false;
  switch (spec_.kind) {
    case TILEMOE_ROUTING_TOP_K: {
      if (choices_.one_in(3)) {
        built = route_tokens(call, routing);
        break;
      }
      tilemoe_route_top_k_args args{};
      args.struct_size = sizeof args;
      call.input(args.ids, any_integer(choices_), {spec_.T, spec_.K}, Layout::kContiguous, false,
                 -1, spec_.E);
      call.input(args.scores, any_float(choices_), {spec_.T, spec_.K});
      call.workspace(args.workspace, args.workspace_bytes, routing_workspace_);
      struct_size_hazard(call, args.struct_size);
      built = call.run([&] { return tilemoe_route_top_k(&routing, &args); });
      break;
    }
    case TILEMOE_ROUTING_GENERAL: {
      tilemoe_route_general_args args{};
      args.struct_size = sizeof args;
      call.input(args.tokens, any_integer(choices_), {spec_.pairs}, Layout::kContiguous, false, -1,
                 spec_.T);
      call.input(args.experts, any_integer(choices_), {spec_.pairs}, Layout::kContiguous, false, -1,
                 spec_.E);
      call.input(args.scores, any_float(choices_), {spec_.pairs});
      call.workspace(args.workspace, args.workspace_bytes, routing_workspace_);
      built = call.run([&] { return tilemoe_route_general(&routing, &args); });
      break;
    }
    case TILEMOE_ROUTING_ROUNDED: {
      tilemoe_route_rounded_args args{};
      args.struct_size = sizeof args;
      call.input(args.logits, any_float(choices_), {spec_.T, spec_.E}, Layout::kRows);
      if (spec_.rounding == TILEMOE_ROUND_STOCHASTIC) {
        call.input(args.seed, TILEMOE_INT64, {1}, Layout::kContiguous, false, -9, 9);
        call.input(args.step, TILEMOE_INT64, {1}, Layout::kContiguous, false, -9, 9);
      }
      if (choices_.one_in(2)) call.output(args.expert_counts, TILEMOE_INT32, {spec_.E});
      call.workspace(args.workspace, args.workspace_bytes, routing_workspace_);
      built = call.run([&] { return tilemoe_route_rounded(&routing, &args); });
      break;
    }
    case TILEMOE_ROUTING_GROUPED: {
      tilemoe_route_grouped_args args{};
      args.struct_size = sizeof args;
      call.input(args.counts, any_integer(choices_), {spec_.E}, Layout::kContiguous, false, -1, 5);
      if (choices_.one_in(2)) call.input(args.scores, TILEMOE_FLOAT32, {routing_.spec.capacity});
      built = call.run([&] { return tilemoe_route_grouped(&routing, &args); });
      break;
    }
  }
  if (built) check_routing();
  return built;
}

void Problem::choose() {
  Call call(world_, choices_, "tilemoe_top_k");
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.scoring = static_cast<tilemoe_scoring>(choices_.below(5));
  const int64_t T = choices_.between(0, 8), E = choices_.between(1, 9);
  args.K = choices_.between(1, E);
  call.input(args.logits, any_float(choices_), {T, E}, Layout::kRows);
  if (args.scoring >= TILEMOE_SIGMOID && choices_.one_in(2))
    call.input(args.selection_bias, TILEMOE_FLOAT32, {E});
  call.output(args.ids, any_integer(choices_), {T, args.K});
  call.output(args.scores, TILEMOE_FLOAT32, {T, args.K});
  if (choices_.one_in(2)) call.output(args.expert_counts, TILEMOE_INT32, {E});
  call.hazard([&args, K = any_number(choices_)] { args.K = K; });
  call.hazard([&args, scoring = choices_.between(-1, 6)] {
    args.scoring = static_cast<tilemoe_scoring>(scoring);
  });
  call.hazard([&args] { args.device = TILEMOE_CUDA; });
  call.run([&] { return tilemoe_top_k(&args); });
}

void Problem::experts_hazards(Call& call, tilemoe_experts& experts) {
  call.hazard([&experts, d = any_number(choices_)] { experts.d = d; });
  call.hazard([&experts, n = any_number(choices_)] { experts.n = n; });
  call.hazard([&experts, E = any_number(choices_)] { experts.E = E; });
  call.hazard([&experts, dtype = choices_.between(-1, 5)] {
    experts.dtype = static_cast<tilemoe_dtype>(dtype);
  });
  call.hazard([&experts, activation = choices_.between(-1, kActivationCount)] {
    experts.activation = static_cast<tilemoe_activation>(activation);
  });
  call.hazard([&experts, layout = choices_.between(-1, 3)] {
    experts.gate_layout = static_cast<tilemoe_gate_layout>(layout);
  });
  call.hazard([&experts] { experts.clamp = -1; });
  call.hazard([&experts] { experts.column_blocks = -1; });
  call.hazard(
      [&experts, rank = any_number(choices_)] { experts.rank_1 = static_cast<int32_t>(rank); });
  call.hazard([&experts] { experts.rank_2 += 8; });
  call.hazard([&experts] { experts.format_1 = TILEMOE_FORMAT_FP8; });  // no call has its arrays
  call.hazard([&experts] { experts.format_H = TILEMOE_FORMAT_FP8; });
  call.hazard([&experts] { experts.weight_blocks = -1; });
  call.hazard([&experts] { experts.struct_size = 0; });
}

void Problem::weights(Call& call, const tilemoe_experts& experts, tilemoe_weights& weights) {
  weights.struct_size = sizeof weights;
  const bool gated = tilemoe_activation_gated(experts.activation);
  const bool split = experts.gate_layout == TILEMOE_GATE_SPLIT;
  const int64_t E = experts.E, d = experts.d, n = experts.n, rows = gated && !split ? 2 * n : n;
  const bool b1 = choices_.one_in(2);
  call.input(weights.W1, experts.dtype, {E, rows, d}, Layout::kMatrix, true);
  call.input(weights.W2, experts.dtype, {E, d, n}, Layout::kMatrix, true);
  const Layout as_W1 = weights.W1.stride[2] == 1 ? Layout::kRows : Layout::kColumns;
  if (split) call.input(weights.W1_up, experts.dtype, {E, n, d}, as_W1, true);
  if (b1) call.input(weights.b1, experts.dtype, {E, rows}, Layout::kRows, true);
  if (b1 && split) call.input(weights.b1_up, experts.dtype, {E, n}, Layout::kRows, true);
  if (choices_.one_in(2)) call.input(weights.b2, experts.dtype, {E, d}, Layout::kRows, true);
}

// Some of the weights' gradients. If they are added to, they contain garbage, so their values are
// not checked.
void Problem::gradients(Call& call, const tilemoe_experts& experts, const tilemoe_weights& weights,
                        tilemoe_weights& gradients, bool accumulate) {
  if (accumulate) call.may_overflow();
  const auto some = [&](tilemoe_tensor& gradient, const tilemoe_tensor& weight,
                        Layout matrix = Layout::kMatrix) {
    if (weight.ndim == 0 || choices_.one_in(3)) return;
    const tilemoe_dtype dtype = choices_.one_in(2) ? experts.dtype : TILEMOE_FLOAT32;
    if (weight.ndim == 3)
      call.output(gradient, dtype, {weight.shape[0], weight.shape[1], weight.shape[2]}, matrix,
                  true);
    else
      call.output(gradient, dtype, {weight.shape[0], weight.shape[1]}, Layout::kRows, true);
  };
  const bool as_W1 = experts.gate_layout == TILEMOE_GATE_INTERLEAVED && weights.W1.stride[2] == 1;
  some(gradients.W1, weights.W1, as_W1 ? Layout::kRows : Layout::kMatrix);
  some(gradients.W1_up, weights.W1_up);
  some(gradients.W2, weights.W2);
  some(gradients.b1, weights.b1), some(gradients.b1_up, weights.b1_up);
  some(gradients.b2, weights.b2);
}

// Packed adapters of the experts' ranks, in the weights' major. Their sums may exceed float16.
void Problem::lora(Call& call, const tilemoe_experts& experts, const tilemoe_weights& weights,
                   tilemoe_packed_lora& lora) {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const int64_t h_width = (tilemoe_activation_gated(experts.activation) ? 2 : 1) * n;
  const auto as = [](const tilemoe_tensor& weight) {
    return weight.stride[2] == 1 ? Layout::kRows : Layout::kColumns;
  };
  lora.struct_size = sizeof lora;
  lora.scale_1 = 0.5f, lora.scale_2 = -2;
  if (experts.rank_1 > 0) {
    call.input(lora.A1, experts.dtype, {E, experts.rank_1, d}, as(weights.W1), true);
    call.input(lora.B1, experts.dtype, {E, h_width, experts.rank_1}, as(weights.W1), true);
    if (experts.gate_layout == TILEMOE_GATE_SPLIT)
      lora.rank_gate = static_cast<int32_t>(8 * choices_.between(0, experts.rank_1 / 8));
  }
  if (experts.rank_2 > 0) {
    call.input(lora.A2, experts.dtype, {E, experts.rank_2, n}, as(weights.W2), true);
    call.input(lora.B2, experts.dtype, {E, d, experts.rank_2}, as(weights.W2), true);
  }
  if (experts.rank_1 > 0 || experts.rank_2 > 0) call.may_overflow();
  call.hazard([&lora] { lora.reserved = 1; });
  call.hazard([&lora] { lora.rank_gate = -8; });
  call.hazard([&lora] { lora.scale_1 = NAN; });
  struct_size_hazard(call, lora.struct_size);
}

void Problem::lora_gradients(Call& call, const tilemoe_experts& experts,
                             const tilemoe_packed_lora& lora, tilemoe_lora& gradients) {
  const bool split = experts.gate_layout == TILEMOE_GATE_SPLIT;
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const int64_t gate = split ? lora.rank_gate : experts.rank_1, up = experts.rank_1 - gate;
  const int64_t rows = tilemoe_activation_gated(experts.activation) && !split ? 2 * n : n;
  gradients.struct_size = sizeof gradients;
  const auto some = [&](tilemoe_tensor& gradient, int64_t of_rows, int64_t columns,
                        Layout layout = Layout::kMatrix) {
    if (of_rows == 0 || columns == 0 || choices_.one_in(3)) return;
    const tilemoe_dtype dtype = choices_.one_in(2) ? experts.dtype : TILEMOE_FLOAT32;
    call.output(gradient, dtype, {E, of_rows, columns}, layout, true);
  };
  const bool interleaved = experts.gate_layout == TILEMOE_GATE_INTERLEAVED;
  some(gradients.A1, gate, d);
  some(gradients.B1, rows, gate, interleaved ? Layout::kRows : Layout::kMatrix);
  some(gradients.A1_up, up, d), some(gradients.B1_up, n, up);
  some(gradients.A2, experts.rank_2, n), some(gradients.B2, d, experts.rank_2);
  struct_size_hazard(call, gradients.struct_size);
}

bool Problem::forward(const tilemoe_experts& good) {
  Call call(world_, choices_, "tilemoe_forward");
  tilemoe_experts experts = good;
  tilemoe_routing routing = routing_;
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  tilemoe_weights all{};
  tilemoe_forward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing, args.weights = &all;
  args.block_turns = static_cast<int32_t>(choices_.below(17));
  weights(call, experts, all);
  tilemoe_packed_lora adapters{};
  lora(call, experts, all, adapters);
  if (experts.rank_1 > 0 || experts.rank_2 > 0) args.lora = &adapters;
  const int64_t h_width = (tilemoe_activation_gated(experts.activation) ? 2 : 1) * experts.n;
  call.input(args.X, experts.dtype, {outer_rows(), experts.d}, Layout::kRows, true);
  call.output(args.O, experts.dtype, {outer_rows(), experts.d}, Layout::kRows, true);
  if (choices_.one_in(2))
    call.input(args.addend, experts.dtype, {outer_rows(), experts.d}, Layout::kRows, true);
  if (choices_.one_in(2)) {
    call.output(saved.H, experts.dtype, {routing_.spec.capacity, h_width}, Layout::kContiguous,
                true);
    if (experts.rank_1 > 0)
      call.output(saved.P1, experts.dtype, {routing_.spec.capacity, experts.rank_1},
                  Layout::kContiguous, true);
    if (experts.rank_2 > 0)
      call.output(saved.P2, experts.dtype, {routing_.spec.capacity, experts.rank_2},
                  Layout::kContiguous, true);
    args.saved = &saved;
    call.may_overflow();  // rows of H and P past the last are not written
  }
  call.workspace(
      args.workspace, args.workspace_bytes,
      layer_workspace(experts, args.saved ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE));
  routing_hazards(call, routing);
  experts_hazards(call, experts);
  call.hazard([&args] { args.routing = nullptr; });
  call.hazard([&args] { args.weights = nullptr; });
  call.hazard([&args] { args.lora = nullptr; });
  call.hazard(
      [&args, turns = any_number(choices_)] { args.block_turns = static_cast<int32_t>(turns); });
  struct_size_hazard(call, args.struct_size);
  struct_size_hazard(call, saved.struct_size);
  struct_size_hazard(call, all.struct_size);
  return call.run([&] { return tilemoe_forward(&experts, &args); });
}

bool Problem::backward(const tilemoe_experts& good) {
  Call call(world_, choices_, "tilemoe_backward");
  tilemoe_experts experts = good;
  tilemoe_routing routing = routing_;
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  tilemoe_weights all{}, dweights{};
  dweights.struct_size = sizeof dweights;
  tilemoe_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing, args.saved = &saved;
  args.weights = &all, args.dweights = &dweights;
  args.mode =
      choices_.pick({TILEMOE_BACKWARD_WHOLE, TILEMOE_BACKWARD_OVER_H, TILEMOE_BACKWARD_FIRST});
  args.accumulate = choices_.one_in(2);
  weights(call, experts, all);
  tilemoe_packed_lora adapters{};
  tilemoe_lora dlora{};
  lora(call, experts, all, adapters);
  if (experts.rank_1 > 0 || experts.rank_2 > 0) args.lora = &adapters, args.dlora = &dlora;
  const int64_t T = outer_rows(), d = experts.d;
  const int64_t h_width = (tilemoe_activation_gated(experts.activation) ? 2 : 1) * experts.n;
  call.input(args.X, experts.dtype, {T, d}, Layout::kRows, true);
  call.input(args.dO, experts.dtype, {T, d}, Layout::kRows, true);
  if (args.mode == TILEMOE_BACKWARD_OVER_H)
    call.output(saved.H, experts.dtype, {routing_.spec.capacity, h_width}, Layout::kContiguous,
                true);
  else
    call.input(saved.H, experts.dtype, {routing_.spec.capacity, h_width}, Layout::kContiguous,
               true);
  if (experts.rank_1 > 0)
    call.input(saved.P1, experts.dtype, {routing_.spec.capacity, experts.rank_1},
               Layout::kContiguous, true);
  if (experts.rank_2 > 0)
    call.input(saved.P2, experts.dtype, {routing_.spec.capacity, experts.rank_2},
               Layout::kContiguous, true);
  if (choices_.one_in(2)) {
    call.output(args.dX, experts.dtype, {T, d}, Layout::kRows, true);
    if (choices_.one_in(2)) call.input(args.addend, experts.dtype, {T, d}, Layout::kRows, true);
  }
  gradients(call, experts, all, dweights, args.accumulate);
  lora_gradients(call, experts, adapters, dlora);
  if (choices_.one_in(2)) call.output(args.ds, TILEMOE_FLOAT32, {routing_.spec.pairs});
  call.workspace(args.workspace, args.workspace_bytes,
                 layer_workspace(experts, TILEMOE_PASS_BACKWARD, args.mode));
  routing_hazards(call, routing);
  experts_hazards(call, experts);
  call.hazard([&args] { args.saved = nullptr; });
  call.hazard([&saved, state = choices_.between(-1, 3)] {
    saved.state = static_cast<tilemoe_saved_state>(state);
  });
  // An unknown mode: H would be an output in one mode, and an input in the others.
  call.hazard([&args, mode = any_number(choices_)] {
    const auto number = static_cast<int32_t>(mode);
    const bool exists = number >= TILEMOE_BACKWARD_WHOLE && number <= TILEMOE_BACKWARD_REST;
    args.mode = static_cast<tilemoe_backward_mode>(exists ? number + 100 : number);
  });
  call.hazard([&args] { args.accumulate = 2; });
  call.hazard([&args] { args.dO = args.dX; });
  call.hazard([&] { args.dweights = nullptr, call.withdraw(dweights); });
  call.hazard([&] { args.dlora = nullptr, call.withdraw(dlora); });
  call.hazard([&args] { args.lora = nullptr; });
  struct_size_hazard(call, args.struct_size);
  struct_size_hazard(call, saved.struct_size);
  struct_size_hazard(call, dweights.struct_size);
  return call.run([&] { return tilemoe_backward(&experts, &args); });
}

void Problem::layer() {
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = any_float(choices_);
  experts.d = 8 * choices_.between(1, 3), experts.n = 8 * choices_.between(1, 3);
  experts.E = spec_.E;
  experts.activation = static_cast<tilemoe_activation>(choices_.below(kActivationCount));
  if (tilemoe_activation_gated(experts.activation))
    experts.gate_layout = static_cast<tilemoe_gate_layout>(choices_.below(3));
  if (experts.activation == TILEMOE_SWIGLU && choices_.one_in(2))
    experts.clamp = 0.5f, experts.alpha = 1.7f, experts.up_shift = 1;
  if (choices_.one_in(2)) {
    experts.rank_1 = static_cast<int32_t>(8 * choices_.between(0, 2));
    experts.rank_2 = static_cast<int32_t>(8 * choices_.between(0, 2));
  }
  forward(experts);
  backward(experts);
}

template <class Args, class Fill>
void Problem::gemm(const char* name, tilemoe_mm mm, const tilemoe_experts& good,
                   tilemoe_status (*entry)(const tilemoe_experts*, const Args*), const Fill& fill) {
  Call call(world_, choices_, name);
  tilemoe_experts experts = good;
  tilemoe_routing routing = routing_;
  Args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.block_turns = static_cast<int32_t>(choices_.below(17));
  fill(call, args);
  tilemoe_mm_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &experts, query.routing = &spec_, query.mm = mm;
  size_t needed = 0;
  check(tilemoe_mm_workspace_bytes(&query, &needed));
  call.workspace(args.workspace, args.workspace_bytes, needed);
  routing_hazards(call, routing);
  experts_hazards(call, experts);
  call.hazard([&args] { args.routing = nullptr; });
  call.hazard(
      [&args, turns = any_number(choices_)] { args.block_turns = static_cast<int32_t>(turns); });
  struct_size_hazard(call, args.struct_size);
  call.run([&] { return entry(&experts, &args); });
}

// gathered_mm, combine_mm and their backwards, each with inputs of its own.
void Problem::gemms() {
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = any_float(choices_);
  experts.d = 8 * choices_.between(1, 3), experts.n = 8 * choices_.between(1, 3);
  experts.E = spec_.E;
  experts.activation = TILEMOE_IDENTITY;
  const tilemoe_dtype dtype = experts.dtype;
  const int64_t E = experts.E, d = experts.d, n = experts.n, capacity = routing_.spec.capacity;
  const bool some = choices_.one_in(2);
  const auto outer = [&](Call& call, tilemoe_tensor& tensor, bool written) {
    if (written) call.output(tensor, dtype, {outer_rows(), d}, Layout::kRows, true);
    if (!written) call.input(tensor, dtype, {outer_rows(), d}, Layout::kRows, true);
  };
  const auto gradients = [&](Call& call, auto& args, int64_t rows, int64_t columns) {
    const tilemoe_dtype of_gradient = some ? dtype : TILEMOE_FLOAT32;
    call.output(args.dW, of_gradient, {E, rows, columns}, Layout::kMatrix, true);
    if (some) call.output(args.db, of_gradient, {E, rows}, Layout::kRows, true);
    args.accumulate = choices_.one_in(3);
    if (args.accumulate) call.may_overflow();  // added to garbage
    call.hazard([&args] { args.accumulate = 2; });
  };
  gemm("tilemoe_gathered_mm", TILEMOE_GATHERED_MM, experts, tilemoe_gathered_mm,
       [&](Call& call, tilemoe_gathered_mm_args& args) {
         outer(call, args.X, false);
         call.input(args.W, dtype, {E, n, d}, Layout::kMatrix, true);
         if (some) call.input(args.b, dtype, {E, n}, Layout::kRows, true);
         call.output(args.H, dtype, {capacity, n}, Layout::kContiguous, true);
       });
  gemm("tilemoe_gathered_mm_backward", TILEMOE_GATHERED_MM_BACKWARD, experts,
       tilemoe_gathered_mm_backward, [&](Call& call, tilemoe_gathered_mm_backward_args& args) {
         outer(call, args.X, false);
         call.input(args.W, dtype, {E, n, d}, Layout::kMatrix, true);
         call.input(args.dH, dtype, {capacity, n}, Layout::kContiguous, true);
         outer(call, args.dX, true);
         if (some) outer(call, args.addend, false);
         gradients(call, args, n, d);
       });
  gemm("tilemoe_combine_mm", TILEMOE_COMBINE_MM, experts, tilemoe_combine_mm,
       [&](Call& call, tilemoe_combine_mm_args& args) {
         call.input(args.A, dtype, {capacity, n}, Layout::kContiguous, true);
         call.input(args.W, dtype, {E, d, n}, Layout::kMatrix, true);
         if (some) call.input(args.b, dtype, {E, d}, Layout::kRows, true);
         outer(call, args.O, true);
         if (some) outer(call, args.addend, false);
       });
  gemm("tilemoe_combine_mm_backward", TILEMOE_COMBINE_MM_BACKWARD, experts,
       tilemoe_combine_mm_backward, [&](Call& call, tilemoe_combine_mm_backward_args& args) {
         call.input(args.A, dtype, {capacity, n}, Layout::kContiguous, true);
         call.input(args.W, dtype, {E, d, n}, Layout::kMatrix, true);
         if (some) call.input(args.b, dtype, {E, d}, Layout::kRows, true);
         outer(call, args.dO, false);
         if (some) call.output(args.dA, dtype, {capacity, n}, Layout::kContiguous, true);
         call.output(args.ds, TILEMOE_FLOAT32, {routing_.spec.pairs});
         gradients(call, args, d, n);
       });
}

void Problem::router_backward() {
  const bool rounded = spec_.kind == TILEMOE_ROUTING_ROUNDED;
  if (!rounded && spec_.kind != TILEMOE_ROUTING_TOP_K) return;
  Call call(world_, choices_, "tilemoe_router_backward");
  tilemoe_routing routing = routing_;
  tilemoe_router_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.scoring =
      rounded ? TILEMOE_SOFTMAX_RENORMALIZED : static_cast<tilemoe_scoring>(choices_.below(5));
  args.accumulate = choices_.one_in(2);
  if (args.accumulate) call.may_overflow();
  const tilemoe_dtype dtype = any_float(choices_);
  call.input(args.logits, dtype, {spec_.T, spec_.E}, Layout::kRows);
  call.input(args.ds, TILEMOE_FLOAT32, {routing_.spec.pairs});
  call.output(args.dlogits, choices_.one_in(2) ? dtype : TILEMOE_FLOAT32, {spec_.T, spec_.E},
              Layout::kRows);
  call.workspace(args.workspace, args.workspace_bytes, routing_workspace_);
  routing_hazards(call, routing);
  call.hazard([&args] { args.accumulate = -1; });
  struct_size_hazard(call, args.struct_size);
  call.hazard([&args, scoring = choices_.between(-1, 5)] {
    args.scoring = static_cast<tilemoe_scoring>(scoring);
  });
  call.run([&] { return tilemoe_router_backward(&args); });
}

void Problem::losses() {
  Call call(world_, choices_, "tilemoe_router_losses");
  tilemoe_router_losses_args args{};
  args.struct_size = sizeof args;
  const int64_t T = choices_.between(0, 8), E = choices_.between(1, 9);
  const tilemoe_dtype dtype = any_float(choices_);
  call.input(args.logits, dtype, {T, E}, Layout::kRows);
  call.input(args.expert_counts, TILEMOE_INT32, {E}, Layout::kContiguous, false, 0, 9);
  if (choices_.one_in(2)) call.output(args.losses, TILEMOE_FLOAT32, {2});
  if (choices_.one_in(2)) {
    call.output(args.dlogits, choices_.one_in(2) ? dtype : TILEMOE_FLOAT32, {T, E}, Layout::kRows);
    call.may_overflow();  // added to garbage
  }
  args.balance_coefficient = 0.5f, args.z_coefficient = 0.25f;
  size_t needed = 0;
  check(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, T, E, &needed));
  call.workspace(args.workspace, args.workspace_bytes, needed);
  call.hazard([&args] { args.z_coefficient = 1 / (args.z_coefficient - 0.25f); });
  call.hazard([&args] { args.device = static_cast<tilemoe_device>(7); });
  call.run([&] { return tilemoe_router_losses(&args); });
}

void Problem::logits() {
  Call call(world_, choices_, "tilemoe_router_logits");
  tilemoe_router_logits_args args{};
  args.struct_size = sizeof args;
  const int64_t T = choices_.between(0, 8), E = choices_.between(1, 9);
  const int64_t d = 8 * choices_.between(1, 3);
  const tilemoe_dtype dtype = any_float(choices_);
  const tilemoe_dtype of_weight = choices_.one_in(2) ? dtype : TILEMOE_FLOAT32;
  call.input(args.X, dtype, {T, d}, Layout::kRows, true);
  call.input(args.weight, of_weight, {E, d}, Layout::kRows, true);
  if (choices_.one_in(2)) call.input(args.bias, any_float(choices_), {E});
  call.output(args.logits, any_float(choices_), {T, E}, Layout::kRows);
  call.may_overflow();
  size_t needed = 0;
  check(tilemoe_router_logits_workspace_bytes(TILEMOE_CPU, T, E, d, of_weight, &needed));
  call.workspace(args.workspace, args.workspace_bytes, needed);
  call.hazard([&args] { args.reserved = 3; });
  call.hazard([&args] { args.device = static_cast<tilemoe_device>(7); });
  struct_size_hazard(call, args.struct_size);
  call.run([&] { return tilemoe_router_logits(&args); });
}

// Every source is one array that ends before an inaccessible page.
void Problem::sum_rows() {
  Call call(world_, choices_, "tilemoe_sum_rows");
  tilemoe_sum_rows_args args{};
  args.struct_size = sizeof args;
  const int64_t rows = choices_.between(0, 8), d = 8 * choices_.between(1, 3);
  const tilemoe_dtype dtype = any_float(choices_);
  const void* source[TILEMOE_MAX_SOURCES] = {};
  args.source = source;
  args.sources = static_cast<int32_t>(choices_.between(1, 4));
  args.source_rows = choices_.between(0, 5);
  call.input(args.place, TILEMOE_INT32, {rows, choices_.between(1, 9)}, Layout::kContiguous, false,
             -2, args.sources * args.source_rows + 1);
  if (choices_.one_in(3)) call.input(args.addend, dtype, {rows, d}, Layout::kRows, true);
  call.output(args.out, dtype, {rows, d}, Layout::kRows, true);
  const bool in_place = choices_.one_in(4);
  if (in_place) call.may_overflow();  // added to garbage
  call.hazard([&args, sources = any_number(choices_)] {
    const auto number = static_cast<int32_t>(sources);
    args.sources = number >= 1 && number <= TILEMOE_MAX_SOURCES ? number + 64 : number;
  });
  call.hazard(
      [&args, rows_given = choices_.pick({int64_t{-1}, INT64_MIN, INT64_MAX, int64_t{1} << 31})] {
        args.source_rows = rows_given;
      });
  call.hazard([&args] { args.source = nullptr; });
  call.hazard([&args] { args.device = static_cast<tilemoe_device>(7); });
  bool lacks_one = false, is_off = false;
  call.hazard([&lacks_one] { lacks_one = true; });
  call.hazard([&is_off] { is_off = true; });
  struct_size_hazard(call, args.struct_size);
  std::memset(world_.sources.begin(), 0x3c, world_.sources.bytes());  // a number in every dtype
  world_.sources.remember();
  call.run([&] {
    const int64_t width = std::clamp<int64_t>(args.out.shape[1], 0, 64);  // it may be spoiled
    const int64_t source_rows = std::clamp<int64_t>(args.source_rows, 0, 5);
    const size_t bytes =
        static_cast<size_t>(source_rows * width) * tilemoe_dtype_size(args.out.dtype);
    const unsigned char* const end = world_.sources.begin() + world_.sources.bytes();
    std::fill_n(source, TILEMOE_MAX_SOURCES, end - bytes - (is_off ? 1 : 0));
    if (lacks_one) source[0] = nullptr;
    if (in_place) args.addend = args.out;
    return tilemoe_sum_rows(&args);
  });
  require(world_.sources.unchanged(), "tilemoe_sum_rows wrote to a source");
}

}  // namespace

void fuzz(World& world, const uint8_t* data, size_t size) {
  Choices choices(data, size);
  world.finite = !choices.one_in(3);
  while (!choices.empty()) {
    fuzz_sizes(world, choices);
    Problem problem(world, choices);
    problem.choose();
    problem.losses();
    problem.logits();
    problem.sum_rows();
    if (!problem.build_routing()) continue;
    problem.layer();
    problem.gemms();
    problem.router_backward();
  }
}

}  // namespace tilemoe::fuzz
