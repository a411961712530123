// The operators of layers whose weights are frozen: with low-rank adapters, or quantised, or both.
#include "layer_call.h"

namespace tilemoe_torch {
namespace {

Adapters adapters_of(const Tensor& packed, const std::vector<int64_t>& ranks,
                     const std::vector<double>& scales) {
  Adapters adapters;
  adapters.ranks = unpack<LoraRanks>("ranks", ranks);
  adapters.scales = unpack<LoraScales>("scales", scales);
  adapters.packed = packed;
  return adapters;
}

}  // namespace

Tensor pack_lora(const Tensors& lora, const Tensors& weight_list, const std::vector<int64_t>& ranks,
                 const std::vector<double>& scales, const std::vector<int64_t>& formats,
                 const std::vector<int64_t>& numbers, ScalarType dtype) {
  const Call call({{"lora", kFactorNames, lora}, {"weights", kWeightNames, weight_list}});
  const Weights weights(call, weight_list, Quantized(formats));
  Adapters adapters;
  adapters.ranks = unpack<LoraRanks>("ranks", ranks);
  adapters.scales = unpack<LoraScales>("scales", scales);
  const Config config(numbers, std::vector<double>(sizeof(Reals) / sizeof(double)));
  const Tensor like = call.empty({0}, dtype);
  tilemoe_experts experts = experts_of(call, like, weights, config);
  adapters.set_ranks(experts);
  const tilemoe_weights all =
      weights.quantized.with_strides(views(call, &weights[0], kWeightNames), weights.shapes());
  const tilemoe_lora unpacked = factors(call, lora, adapters.scales);
  tilemoe_pack_lora_args args{};
  args.struct_size = sizeof args;
  args.lora = &unpacked, args.weights = &all;
  check(tilemoe_packed_lora_bytes(&experts, &args.bytes));
  const Tensor packed = call.bytes(args.bytes);
  args.memory = packed.data_ptr();
  args.stream = call.stream();
  tilemoe_packed_lora made{};
  made.struct_size = sizeof made;
  check(tilemoe_pack_lora(&experts, &args, &made));
  return packed;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> experts_lora(
    const Tensor& X, const MaybeTensor& router, const Tensor& routing, const Tensors& weight_list,
    const MaybeTensor& addend, const Tensors& lora, const Tensor& packed, const Tensors& quantized,
    int64_t capacity, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, bool keep_H) {
  const Call call({{"X", X},
                   {"router", router},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"addend", addend},
                   {"lora", kFactorNames, lora},
                   {"packed", packed},
                   {"quantized", kQuantizedNames, quantized, true}});
  const Weights weights(call, weight_list, Quantized(quantized, formats));
  const Config config(numbers, reals);
  Adapters adapters = adapters_of(packed, ranks, scales);
  tilemoe_experts layer = experts_of(call, X, weights, config);
  adapters.set_ranks(layer);
  const tilemoe_routing_spec spec = spec_of(call, X, layer, config.numbers, capacity);
  const ScalarType dtype = X.scalar_type();
  const Tensor O = call.empty({X.size(0), X.size(1)}, dtype);
  const auto kept = [&](int64_t columns, ScalarType kind) {
    return keep_H && columns > 0 ? call.empty({spec.capacity, columns}, kind)
                                 : call.empty({0}, kind);
  };
  const ScalarType of_H = layer.format_H == TILEMOE_FORMAT_NONE ? dtype : ScalarType::Byte;
  const Tensor H = kept(saved_columns(layer), of_H);
  const Tensor P1 = kept(layer.rank_1, dtype), P2 = kept(layer.rank_2, dtype);
  if (keep_H && layer.rank_1 > 0) adapters.P1 = P1;
  if (keep_H && layer.rank_2 > 0) adapters.P2 = P2;
  forward_into(call, X, routing, weights, addend, layer, spec, nullptr, O,
               keep_H ? MaybeTensor(H) : std::nullopt, adapters);
  return {O, H, P1, P2};
}

namespace {

std::vector<Tensor> lora_backward(
    tilemoe_backward_mode mode, const MaybeTensor& dO, const Tensor& X, const Tensor& H,
    const Tensor& P1, const Tensor& P2, const Tensor& routing, const Tensors& weight_list,
    const Tensor& packed, const Tensors& quantized, const std::vector<int64_t>& ranks,
    const std::vector<double>& scales, const std::vector<int64_t>& formats,
    const std::vector<int64_t>& numbers, const std::vector<double>& reals, ScalarType factor_dtype,
    int64_t wanted, const MaybeTensor& H_codes = std::nullopt) {
  const Call call({{"dO", dO},
                   {"X", X},
                   {"H", H},
                   {"H_codes", H_codes},
                   {"P1", P1},
                   {"P2", P2},
                   {"routing", routing},
                   {"weights", kWeightNames, weight_list},
                   {"packed", packed},
                   {"quantized", kQuantizedNames, quantized, true}});
  const Weights weights(call, weight_list, Quantized(quantized, formats));
  const Config config(numbers, reals);
  Adapters adapters = adapters_of(packed, ranks, scales);
  if (adapters.rank_1() > 0) adapters.P1 = P1;
  if (adapters.rank_2() > 0) adapters.P2 = P2;
  const int64_t of_layer = wanted & (bit(kGradients) - 1);
  Gradients gradients(kGradients);
  allocate(call, of_layer, X, H, weights, config.numbers, false, gradients);
  const int64_t E = weights.W2().size(0), d = weights.W2().size(1), n = weights.W2().size(2);
  const auto& [gate, up, down] = adapters.ranks;
  const int64_t shapes[kFactors][2] = {
      {gate, d}, {weights.W1().size(1), gate}, {up, d}, {n, up}, {down, n}, {d, down}};
  for (size_t i = 0; i < kFactors; ++i)
    if (wanted & bit(kGradients + i))
      adapters.gradients[i] = call.empty({E, shapes[i][0], shapes[i][1]}, factor_dtype);
  backward(call, dO, X, H, mode, routing, weights, config, gradients, false, nullptr, nullptr,
           adapters, false, false, H_codes);
  std::vector<Tensor> made = in_order(gradients, of_layer);
  for (const MaybeTensor& gradient : adapters.gradients)
    if (gradient) made.push_back(*gradient);
  return made;
}

}  // namespace

std::vector<Tensor> experts_lora_backward(
    const Tensor& dO, const Tensor& X, const Tensor& H, const Tensor& P1, const Tensor& P2,
    const Tensor& routing, const Tensors& weight_list, const Tensor& packed,
    const Tensors& quantized, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, ScalarType factor_dtype, int64_t wanted) {
  return lora_backward(TILEMOE_BACKWARD_WHOLE, dO, X, H, P1, P2, routing, weight_list, packed,
                       quantized, ranks, scales, formats, numbers, reals, factor_dtype, wanted);
}

std::vector<Tensor> experts_lora_backward_over_H(
    const MaybeTensor& dO, const Tensor& X, const Tensor& H, const Tensor& P1, const Tensor& P2,
    const Tensor& routing, const Tensors& weight_list, const Tensor& packed,
    const Tensors& quantized, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, ScalarType factor_dtype, int64_t wanted,
    const MaybeTensor& H_codes) {
  return lora_backward(dO ? TILEMOE_BACKWARD_OVER_H : TILEMOE_BACKWARD_REST, dO, X, H, P1, P2,
                       routing, weight_list, packed, quantized, ranks, scales, formats, numbers,
                       reals, factor_dtype, wanted, H_codes);
}

}  // namespace tilemoe_torch
