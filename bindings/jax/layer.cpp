// The targets of the layer. forward builds the routing and packs adapters, too; backward reads both.
#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "view.h"

namespace tilemoe_jax {
namespace {

std::atomic<int32_t> process_ctas_per_sm = 1;

// (E, d, n); codes are never transposed.
std::vector<int64_t> shape_of_W2(const Call& call) {
  if (const Array* const codes = call.find("W2_codes")) return codes->dims;
  const tilemoe_tensor W2 = call.weight("W2");
  return {W2.shape, W2.shape + W2.ndim};
}

tilemoe_experts experts_of(const Call& call) {
  const tilemoe_tensor X = call.tensor("X");
  const std::vector<int64_t> of_W2 = shape_of_W2(call);
  if (of_W2.size() != 3)
    refuse("W2 has " + std::to_string(of_W2.size()) + " dimensions, expected (E, d, n)");
  auto experts = sized<tilemoe_experts>();
  experts.device = call.device;
  experts.dtype = X.dtype;
  experts.E = of_W2[0], experts.d = of_W2[1], experts.n = of_W2[2];
  experts.activation = call.kind<tilemoe_activation>("activation");
  experts.gate_layout = call.kind<tilemoe_gate_layout>("gate_layout");
  experts.clamp = call.real("clamp");
  experts.alpha = call.real("alpha");
  experts.up_shift = call.real("up_shift");
  experts.column_blocks = call.kind<int32_t>("column_blocks");
  experts.rank_1 = call.kind<int32_t>("rank_gate") + call.kind<int32_t>("rank_up");
  experts.rank_2 = call.kind<int32_t>("rank_down");
  set_formats(call, experts);
  return experts;
}

tilemoe_routing_spec spec_of(const Call& call, const tilemoe_experts& experts) {
  const tilemoe_tensor X = call.tensor("X");
  auto spec = sized<tilemoe_routing_spec>();
  spec.device = call.device;
  spec.kind = call.kind<tilemoe_routing_kind>("kind");
  spec.T = spec.kind == TILEMOE_ROUTING_GROUPED ? 0 : X.shape[0];
  spec.E = experts.E, spec.K = call.number("K");
  spec.capacity = call.number("capacity");
  return spec;
}

tilemoe_weights weights_of(const Call& call, const std::string& prefix = "") {
  auto all = sized<tilemoe_weights>();
  all.W1 = call.weight(prefix + "W1");
  all.W1_up = call.weight(prefix + "W1_up");
  all.W2 = call.weight(prefix + "W2");
  all.b1 = call.tensor(prefix + "b1");
  all.b1_up = call.tensor(prefix + "b1_up");
  all.b2 = call.tensor(prefix + "b2");
  return all;
}

tilemoe_lora factors_of(const Call& call, const std::string& prefix = "") {
  auto lora = sized<tilemoe_lora>();
  lora.A1 = call.tensor(prefix + "A1"), lora.B1 = call.tensor(prefix + "B1");
  lora.A1_up = call.tensor(prefix + "A1_up"), lora.B1_up = call.tensor(prefix + "B1_up");
  lora.A2 = call.tensor(prefix + "A2"), lora.B2 = call.tensor(prefix + "B2");
  lora.scale_1 = call.real("scale_1"), lora.scale_2 = call.real("scale_2");
  return lora;
}

bool has_adapters(const tilemoe_experts& experts) {
  return experts.rank_1 + experts.rank_2 > 0;
}

tilemoe_packed_lora bind_adapters(const Call& call, const tilemoe_experts& experts,
                                  const tilemoe_weights& weights) {
  auto packed = sized<tilemoe_packed_lora>();
  packed.scale_1 = call.real("scale_1"), packed.scale_2 = call.real("scale_2");
  if (experts.gate_layout == TILEMOE_GATE_SPLIT) packed.rank_gate = call.kind<int32_t>("rank_gate");
  check(tilemoe_packed_lora_bind(&experts, &weights, call.memory("packed"), call.bytes("packed"),
                                 &packed));
  return packed;
}

void pack_adapters(const Call& call, const tilemoe_experts& experts,
                   const tilemoe_weights& weights) {
  const tilemoe_lora lora = factors_of(call);
  auto args = sized<tilemoe_pack_lora_args>();
  args.lora = &lora, args.weights = &weights;
  args.memory = call.memory("packed"), args.bytes = call.bytes("packed");
  args.stream = call.stream;
  auto packed = sized<tilemoe_packed_lora>();
  check(tilemoe_pack_lora(&experts, &args, &packed));
}

tilemoe_routing bind_routing(const Call& call, const tilemoe_routing_spec& spec) {
  auto routing = sized<tilemoe_routing>();
  check(tilemoe_routing_bind(&spec, call.memory("routing"), call.bytes("routing"), &routing));
  return routing;
}

void build_routing(const Call& call, tilemoe_routing& routing, const Workspace& workspace) {
  if (routing.spec.kind == TILEMOE_ROUTING_GROUPED) {
    auto args = sized<tilemoe_route_grouped_args>();
    args.counts = call.tensor("ids"), args.scores = call.tensor("scores");
    args.stream = call.stream;
    return check(tilemoe_route_grouped(&routing, &args));
  }
  auto args = sized<tilemoe_route_top_k_args>();
  args.ids = call.tensor("ids"), args.scores = call.tensor("scores");
  args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
  args.stream = call.stream;
  check(tilemoe_route_top_k(&routing, &args));
}

size_t pass_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                  tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients,
                  int32_t cuda_sms) {
  auto query = sized<tilemoe_workspace_query>();
  query.experts = &experts, query.routing = &spec;
  query.pass = pass, query.mode = mode, query.gradients = gradients;
  query.cuda_sms = experts.device == TILEMOE_CUDA ? cuda_sms : 0;
  size_t bytes = 0;
  check(tilemoe_workspace_bytes(&query, &bytes));
  return bytes;
}

// The routing is built in the same workspace, before.
size_t forward_bytes(const Call& call, const tilemoe_experts& experts,
                     const tilemoe_routing_spec& spec, int32_t cuda_sms) {
  size_t of_routing = 0;
  check(tilemoe_routing_workspace_bytes(&spec, &of_routing));
  const tilemoe_pass pass = call.number("saves") ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE;
  return std::max(of_routing, pass_bytes(experts, spec, pass, TILEMOE_BACKWARD_WHOLE, 0, cuda_sms));
}

size_t backward_bytes(const Call& call, const tilemoe_experts& experts,
                      const tilemoe_routing_spec& spec, int32_t cuda_sms) {
  return pass_bytes(experts, spec, TILEMOE_PASS_BACKWARD, call.kind<tilemoe_backward_mode>("mode"),
                    call.kind<uint32_t>("gradients"), cuda_sms);
}

tilemoe_forward_args forward_args(const Call& call, const tilemoe_routing& routing,
                                  const tilemoe_weights& weights) {
  auto args = sized<tilemoe_forward_args>();
  args.routing = &routing, args.weights = &weights;
  args.X = call.tensor("X"), args.O = call.tensor("O"), args.addend = call.tensor("addend");
  args.stream = call.stream;
  args.block_turns = process_ctas_per_sm.load(std::memory_order_relaxed);
  return args;
}

tilemoe_saved saved_of(const Call& call, const tilemoe_experts& experts,
                       const tilemoe_routing& routing) {
  auto saved = sized<tilemoe_saved>();
  saved.H = call.tensor("H"), saved.P1 = call.tensor("P1"), saved.P2 = call.tensor("P2");
  if (call.has("H_codes")) save_codes_of_H(call, experts, routing.spec.capacity, saved);
  return saved;
}

// dH has the memory of H, or its own, and then the memory of codes of H is written, too.
void consume_H(const Call& call, const tilemoe_experts& experts, tilemoe_saved& saved) {
  bool in_place = call.memory("dH") == saved.H.data;
  if (experts.format_H != TILEMOE_FORMAT_NONE)
    in_place =
        call.memory("dH_codes") == saved.H_codes && call.memory("dH_scales") == saved.H_scales;
  if (!in_place)
    throw tilemoe::Error(tilemoe::Status::kInternalError,
                         "expected dH in the memory of H, but XLA placed it elsewhere");
  saved.H = call.tensor("dH");
}

}  // namespace

void set_ctas_per_sm(int32_t count) {
  process_ctas_per_sm.store(count, std::memory_order_relaxed);
}

void forward(Call& call) {
  const tilemoe_experts experts = experts_of(call);
  const tilemoe_routing_spec spec = spec_of(call, experts);
  const tilemoe_weights weights = weights_of(call);
  const Workspace workspace(call,
                            call.device == TILEMOE_CPU ? forward_bytes(call, experts, spec, 0) : 0);
  tilemoe_routing routing = bind_routing(call, spec);
  build_routing(call, routing, workspace);
  tilemoe_forward_args args = forward_args(call, routing, weights);
  tilemoe_saved saved = saved_of(call, experts, routing);
  if (call.number("saves")) args.saved = &saved;
  const tilemoe_quantized_weights quantized = quantized_of(call, experts);
  if (has_codes(call)) args.quantized = &quantized;
  tilemoe_packed_lora packed{};
  if (has_adapters(experts)) {
    pack_adapters(call, experts, weights);
    packed = bind_adapters(call, experts, weights);
    args.lora = &packed;
  }
  args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
  check(tilemoe_forward(&experts, &args));
}

void backward(Call& call) {
  const tilemoe_experts experts = experts_of(call);
  const tilemoe_routing_spec spec = spec_of(call, experts);
  const tilemoe_weights weights = weights_of(call), dweights = weights_of(call, "d");
  const tilemoe_routing routing = bind_routing(call, spec);
  const Workspace workspace(
      call, call.device == TILEMOE_CPU ? backward_bytes(call, experts, spec, 0) : 0);
  tilemoe_saved saved = saved_of(call, experts, routing);
  auto args = sized<tilemoe_backward_args>();
  args.mode = call.kind<tilemoe_backward_mode>("mode");
  if (args.mode == TILEMOE_BACKWARD_REST) saved.state = TILEMOE_SAVED_DH_OVER_H;
  if (args.mode == TILEMOE_BACKWARD_OVER_H) consume_H(call, experts, saved);
  args.routing = &routing, args.weights = &weights, args.dweights = &dweights;
  args.X = call.tensor("X"), args.dO = call.tensor("dO");
  args.saved = &saved;
  args.dX = call.tensor("dX"), args.ds = call.tensor("ds");
  const tilemoe_quantized_weights quantized = quantized_of(call, experts);
  if (has_codes(call)) args.quantized = &quantized;
  const tilemoe_lora dlora = factors_of(call, "d");
  tilemoe_packed_lora packed{};
  if (has_adapters(experts)) {
    packed = bind_adapters(call, experts, weights);
    args.lora = &packed, args.dlora = &dlora;
  }
  args.workspace = workspace.data(), args.workspace_bytes = workspace.bytes();
  args.stream = call.stream;
  args.block_turns = process_ctas_per_sm.load(std::memory_order_relaxed);
  check(tilemoe_backward(&experts, &args));
}

Sizes forward_sizes(const Call& call, int32_t cuda_sms) {
  const tilemoe_experts experts = experts_of(call);
  const tilemoe_routing_spec spec = spec_of(call, experts);
  Sizes sizes;
  size_t routing = 0, packed = 0;
  check(tilemoe_routing_capacity(&spec, &sizes.capacity));
  check(tilemoe_routing_bytes(&spec, &routing));
  if (has_adapters(experts)) check(tilemoe_packed_lora_bytes(&experts, &packed));
  sizes.routing = static_cast<int64_t>(routing), sizes.packed = static_cast<int64_t>(packed);
  sizes.workspace = static_cast<int64_t>(forward_bytes(call, experts, spec, cuda_sms));
  return sizes;
}

Sizes backward_sizes(const Call& call, int32_t cuda_sms) {
  const tilemoe_experts experts = experts_of(call);
  Sizes sizes;
  sizes.workspace =
      static_cast<int64_t>(backward_bytes(call, experts, spec_of(call, experts), cuda_sms));
  return sizes;
}

// The addresses belong to no memory: a dry run reads none.
void check_forward(Call call, const Sizes& sizes) {
  using xla::ffi::DataType;
  const tilemoe_experts experts = experts_of(call);
  const tilemoe_routing_spec spec = spec_of(call, experts);
  const Array X = *call.find("X");
  call.add("O", X.dtype, X.dims);
  const bool gated = tilemoe_activation_gated(experts.activation) != 0;
  const std::vector<int64_t> dims{sizes.capacity, gated ? 2 * experts.n : experts.n};
  if (experts.format_H == TILEMOE_FORMAT_NONE) {
    call.add("H", X.dtype, dims);
  } else {
    call.add("H_codes", DataType::U8, dims);
    call.add("H_scales", DataType::F32, dims_of_H_scales(experts, sizes.capacity));
  }
  if (experts.rank_1 > 0) call.add("P1", X.dtype, {sizes.capacity, experts.rank_1});
  if (experts.rank_2 > 0) call.add("P2", X.dtype, {sizes.capacity, experts.rank_2});
  call.add("routing", DataType::U8, {sizes.routing});
  call.add("packed", DataType::U8, {sizes.packed});
  const tilemoe_weights weights = weights_of(call);
  const tilemoe_routing routing = bind_routing(call, spec);
  tilemoe_forward_args args = forward_args(call, routing, weights);
  tilemoe_saved saved = saved_of(call, experts, routing);
  args.saved = &saved, args.dry_run = 1;
  const tilemoe_quantized_weights quantized = quantized_of(call, experts);
  if (has_codes(call)) args.quantized = &quantized;
  tilemoe_packed_lora packed{};
  if (has_adapters(experts)) packed = bind_adapters(call, experts, weights), args.lora = &packed;
  check(tilemoe_forward(&experts, &args));
}

}  // namespace tilemoe_jax
