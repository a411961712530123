#include "layer_call.h"

#include <bit>
#include <string>

#include "router.h"
#include "routing.h"

namespace tilemoe_torch {

tilemoe_weights views(const Call& call, const MaybeTensor* first, const char* const* names) {
  tilemoe_weights all{};
  all.struct_size = sizeof all;
  all.W1 = call.view(names[kW1], first[kW1]);
  all.W1_up = call.view(names[kW1Up], first[kW1Up]);
  all.W2 = call.view(names[kW2], first[kW2]);
  all.b1 = call.view(names[kB1], first[kB1]);
  all.b1_up = call.view(names[kB1Up], first[kB1Up]);
  all.b2 = call.view(names[kB2], first[kB2]);
  return all;
}

tilemoe_lora factors(const Call& call, const Tensors& list, const LoraScales& scales) {
  tilemoe_lora lora{};
  lora.struct_size = sizeof lora;
  lora.A1 = call.view("A1", list[kA1]), lora.B1 = call.view("B1", list[kFactorB1]);
  lora.A1_up = call.view("A1_up", list[kA1Up]), lora.B1_up = call.view("B1_up", list[kFactorB1Up]);
  lora.A2 = call.view("A2", list[kA2]), lora.B2 = call.view("B2", list[kFactorB2]);
  lora.scale_1 = static_cast<float>(scales.of_W1), lora.scale_2 = static_cast<float>(scales.of_W2);
  return lora;
}

namespace {

// If the sizes of W1 and W2 do not match, either may be wrong: the message contains both.
void check_one_layer(const tilemoe_experts& experts, const Tensor& W1, const Tensor& W2) {
  const bool gated = tilemoe_activation_gated(experts.activation);
  if (!gated && experts.gate_layout != TILEMOE_GATE_CONCATENATED) return;  // the library rejects it
  const bool both = gated && experts.gate_layout != TILEMOE_GATE_SPLIT;
  const int64_t rows = both ? 2 * experts.n : experts.n;
  if (W1.dim() == 3 && W1.size(0) == experts.E && W1.size(1) == rows && W1.size(2) == experts.d)
    return;
  refuse("W1 has shape " + describe_shape(W1) + ", W2 has shape " + describe_shape(W2) +
         ", expected " + (both ? "(E, 2n, d)" : "(E, n, d)") +
         " and (E, d, n) of the same E, n and d");
}

}  // namespace

tilemoe_experts experts_of(const Call& call, const Tensor& X, const Weights& weights,
                           const Config& config) {
  const auto& [numbers, reals] = config;
  check_dims("W2", weights.W2(), 3, "(E, d, n)");
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = call.device();
  experts.dtype = call.view("X", X).dtype;
  experts.E = weights.W2().size(0), experts.d = weights.W2().size(1);
  experts.n = weights.W2().size(2);
  experts.activation = narrowed<tilemoe_activation>("activation", numbers.activation);
  experts.gate_layout = narrowed<tilemoe_gate_layout>("gate_layout", numbers.gate_layout);
  experts.clamp = static_cast<float>(reals.clamp);
  experts.alpha = static_cast<float>(reals.alpha);
  experts.up_shift = static_cast<float>(reals.up_shift);
  experts.column_blocks = narrowed<int32_t>("column_blocks", numbers.column_blocks);
  experts.weight_blocks = narrowed<int32_t>("weight_blocks", numbers.weight_blocks);
  experts.recipe = narrowed<tilemoe_recipe>("recipe", numbers.recipe);
  experts.format_H = narrowed<tilemoe_format>("save_h", numbers.save_h);
  weights.quantized.set_formats(experts);
  check_one_layer(experts, weights.W1(), weights.W2());
  return experts;
}

tilemoe_routing_spec spec_of(const Call& call, const Tensor& X, const tilemoe_experts& experts,
                             const Numbers& numbers, int64_t capacity) {
  check_dims("X", X, 2, "(T, d)");
  const auto kind = narrowed<tilemoe_routing_kind>("kind", numbers.rule.kind);
  const int64_t T = kind == TILEMOE_ROUTING_GROUPED ? 0 : X.size(0);
  return routing_spec(call, kind, T, experts.E, numbers.rule.K, capacity);
}

size_t workspace_size(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                      tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) {
  tilemoe_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &experts, query.routing = &spec;
  query.pass = pass, query.mode = mode, query.gradients = gradients;
  size_t bytes = 0;
  check(tilemoe_workspace_bytes(&query, &bytes));
  return bytes;
}

namespace {

Tensor workspace_for(const Call& call, const tilemoe_experts& experts,
                     const tilemoe_routing_spec& spec, tilemoe_pass pass,
                     tilemoe_backward_mode mode, uint32_t gradients, size_t* bytes) {
  *bytes = workspace_size(experts, spec, pass, mode, gradients);
  return call.bytes(*bytes);
}

// The bits of the gradients that exist. If there are none, which the library reads as all, dW1's
// bit: its workspace is the smallest, and sufficient for dH over H.
uint32_t workspace_bits(const Gradients& gradients, const Tensors& of_factors) {
  int64_t bits = 0;
  for (size_t i = 0; i < kFactors; ++i)
    if (of_factors[i]) bits |= i < kA2 ? TILEMOE_GRADIENT_LORA_1 : TILEMOE_GRADIENT_LORA_2;
  for (size_t i = 0; i < kGradients; ++i)
    if (gradients[i]) bits |= bit(i);
  return bits ? static_cast<uint32_t>(bits) : uint32_t{TILEMOE_GRADIENT_W1};
}

}  // namespace

int64_t saved_columns(const tilemoe_experts& experts) {
  if (experts.format_H == TILEMOE_FORMAT_NONE)
    return tilemoe_activation_gated(experts.activation) ? 2 * experts.n : experts.n;
  constexpr int64_t kBlock = 128, kScales = 2 * sizeof(float);  // of gate and up
  return 2 * experts.n + kScales * ((experts.n + kBlock - 1) / kBlock);
}

namespace {

// Codes and scales in one tensor of bytes.
void save_codes(const Tensor& H, const tilemoe_experts& experts, tilemoe_saved& saved) {
  const int64_t columns = saved_columns(experts);
  if (H.dim() != 2 || H.size(1) != columns || H.scalar_type() != ScalarType::Byte ||
      !H.is_contiguous())
    refuse("H has shape " + describe_shape(H) + ", expected (capacity, " + std::to_string(columns) +
           ") bytes: codes and their scales");
  auto* const codes = static_cast<uint8_t*>(H.data_ptr());
  saved.H_codes = codes;
  saved.H_scales = reinterpret_cast<float*>(codes + H.size(0) * 2 * experts.n);
}

}  // namespace

void allocate(const Call& call, int64_t wanted, const Tensor& X, const Tensor& H,
              const Weights& weights, const Numbers& numbers, bool accumulate,
              Gradients& gradients) {
  check_dims("X", X, 2, "(T, d)");
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  if (wanted & bit(kDX)) gradients[kDX] = call.empty({X.size(0), X.size(1)}, X.scalar_type());
  if (wanted & bit(kDs))
    gradients[kDs] = numbers.rule.kind == TILEMOE_ROUTING_TOP_K
                         ? call.empty({X.size(0), numbers.rule.K}, ScalarType::Float)
                         : call.empty({H.size(0)}, ScalarType::Float);
  for (size_t place = 0; place < kWeights; ++place) {
    if (!(wanted & bit(kDWeights + place))) continue;
    const MaybeTensor& weight = weights.shapes()[place];  // a quantised one has a gradient with fp8
    if (!weight) refuse(std::string(kWeightNames[place]) + " is required for its gradient");
    MaybeTensor& gradient = gradients[kDWeights + place];
    gradient =
        weights.quantized.of(place)
            ? call.empty({weight->size(0), weight->size(1), weight->size(2)}, weight->scalar_type())
            : empty_like_weight(*weight);
    if (accumulate) zero(*gradient);
  }
}

std::vector<Tensor> in_order(const Gradients& gradients, int64_t wanted) {
  std::vector<Tensor> made;
  for (size_t i = 0; i < kGradients; ++i)
    if (wanted & bit(i)) made.push_back(*gradients[i]);
  return made;
}

void forward_into(const Call& call, const Tensor& X, const Tensor& routing_tensor,
                  const Weights& weights, const MaybeTensor& addend, const tilemoe_experts& layer,
                  const tilemoe_routing_spec& spec, const tilemoe_part* part, const Tensor& O,
                  const MaybeTensor& H, const Adapters& adapters) {
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor added = addend ? MaybeTensor(dense_rows_on_16(*addend)) : std::nullopt;
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  if (H) {
    if (layer.format_H == TILEMOE_FORMAT_NONE)
      saved.H = call.view("H", *H);
    else
      save_codes(*H, layer, saved);
    adapters.save(call, saved);
  }

  const tilemoe_weights all = views(call, &weights[0], kWeightNames);
  tilemoe_forward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all;
  args.X = call.view("X", rows);
  args.O = call.view("O", O);
  args.addend = call.view("addend", added);
  args.saved = H ? &saved : nullptr;
  args.block_turns = call.ctas_per_sm();
  args.part = part;
  const tilemoe_quantized_weights quantized = weights.quantized.view(weights.shapes());
  if (weights.quantized.exist()) args.quantized = &quantized;
  tilemoe_packed_lora lora{};
  if (adapters.exist()) {
    lora = adapters.view(layer, weights.quantized.with_strides(all, weights.shapes()));
    args.lora = &lora;
  }
  const Tensor workspace =
      workspace_for(call, layer, spec, H ? TILEMOE_PASS_FORWARD : TILEMOE_PASS_INFERENCE,
                    TILEMOE_BACKWARD_WHOLE, 0, &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_forward(&layer, &args));
}

void backward(const Call& call, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
              tilemoe_backward_mode mode, const Tensor& routing_tensor, const Weights& weights,
              const Config& config, const Gradients& gradients, bool accumulate,
              const tilemoe_part* part, const Tensor* given_workspace, const Adapters& adapters,
              bool dH_in_workspace, bool adds_to_dX, const MaybeTensor& H_codes) {
  const Tensor rows = dense_rows_on_16(X);
  const MaybeTensor grad_rows = dO ? MaybeTensor(dense_rows_on_16(*dO)) : std::nullopt;
  tilemoe_experts experts = experts_of(call, X, weights, config);
  adapters.set_ranks(experts);
  check_dims("H", H, 2, "(capacity, 2n) or (capacity, n)");
  const tilemoe_routing_spec spec = spec_of(call, X, experts, config.numbers, H.size(0));
  const tilemoe_routing routing = bind_routing(call, spec, routing_tensor);
  tilemoe_saved saved{};
  saved.struct_size = sizeof saved;
  if (experts.format_H == TILEMOE_FORMAT_NONE || mode != TILEMOE_BACKWARD_WHOLE)
    saved.H = call.view("H", H);
  else
    save_codes(H, experts, saved);
  if (H_codes) save_codes(*H_codes, experts, saved);
  adapters.save(call, saved);
  saved.state = mode == TILEMOE_BACKWARD_REST ? TILEMOE_SAVED_DH_OVER_H : TILEMOE_SAVED_H;
  if (mode == TILEMOE_BACKWARD_REST && dH_in_workspace)
    saved.state = TILEMOE_SAVED_H_AND_DH, saved.dH = given_workspace->data_ptr();
  if (part && part->first_token > 0) {  // the parts come in the order of their tokens
    saved.state = TILEMOE_SAVED_PARTS_OF_DH;
    saved.parts_tokens = part->first_token;
  }

  const tilemoe_weights all = views(call, &weights[0], kWeightNames);
  const tilemoe_weights dweights = views(call, &gradients[kDWeights], &kGradientNames[kDWeights]);

  tilemoe_backward_args args{};
  args.struct_size = sizeof args;
  args.routing = &routing;
  args.weights = &all, args.dweights = &dweights;
  args.X = call.view("X", rows);
  args.dO = call.view("dO", grad_rows);
  args.saved = &saved;
  args.mode = mode;
  args.dX = call.view("dX", gradients[kDX]);
  args.ds = call.view("ds", gradients[kDs]);
  if (adds_to_dX) args.addend = args.dX;
  args.accumulate = accumulate;
  args.block_turns = call.ctas_per_sm();
  args.part = part;
  const tilemoe_quantized_weights quantized = weights.quantized.view(weights.shapes());
  if (weights.quantized.exist()) args.quantized = &quantized;
  tilemoe_packed_lora lora{};
  if (adapters.exist()) {
    lora = adapters.view(experts, weights.quantized.with_strides(all, weights.shapes()));
    args.lora = &lora;
  }
  const tilemoe_lora dlora = factors(call, adapters.gradients, adapters.scales);
  if (adapters.exist()) args.dlora = &dlora;
  args.workspace_bytes = given_workspace ? static_cast<size_t>(given_workspace->numel()) : 0;
  const Tensor workspace =
      given_workspace
          ? *given_workspace
          : workspace_for(call, experts, spec, TILEMOE_PASS_BACKWARD, mode,
                          workspace_bits(gradients, adapters.gradients), &args.workspace_bytes);
  args.workspace = workspace.data_ptr();
  args.stream = call.stream();
  check(tilemoe_backward(&experts, &args));
}

}  // namespace tilemoe_torch
