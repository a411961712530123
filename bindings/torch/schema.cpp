// The operators' names and arguments, once for all devices. Python registers fake kernels
// (python/tilemoe/_shapes.py) and autograd kernels (ops.py; autograd.py for experts and moe,
// _router_autograd.py for moe_with_router, _lora_autograd.py for experts_lora).
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "namespace.h"
#include "routing/routing_layout.h"
#include "tilemoe/tilemoe.h"

namespace {

using Names = std::vector<std::string>;

int64_t version() {
  return TILEMOE_VERSION_NUMBER;
}

// The names of an operator's `rule`, of what follows it in `numbers`, and of `reals`.
std::tuple<Names, Names, Names> option_names() {
  const Names rule = {
#define RULE(name) #name,
#include "options.inc"
  };
  const Names numbers = {
#define NUMBER(name) #name,
#include "options.inc"
  };
  const Names reals = {
#define REAL(name) #name,
#include "options.inc"
  };
  return {rule, numbers, reals};
}

std::tuple<Names, std::vector<int64_t>, std::vector<int64_t>> routing_layout(int64_t kind) {
  if (kind < TILEMOE_ROUTING_TOP_K || kind > TILEMOE_ROUTING_GROUPED)
    throw std::runtime_error("invalid argument: kind must be a tilemoe_routing_kind, got " +
                             std::to_string(kind));
  Names names;
  std::vector<int64_t> sizes, more;
  for (const tilemoe::RoutingArray& of : tilemoe::kRoutingArrays) {
    if (!of.is_in(static_cast<tilemoe_routing_kind>(kind))) continue;
    names.emplace_back(of.array.name);
    sizes.push_back(of.array.size), more.push_back(of.array.more);
  }
  return {names, sizes, more};
}

std::vector<std::string> activation_formulas() {
  return {
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) formula,
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
  };
}

}  // namespace

// packing.h has the order of the lists `weights`, `gradients`, `rule`, `numbers` and `reals`.
TILEMOE_TORCH_LIBRARY(TILEMOE_TORCH_NAMESPACE, m) {
  // logits (T, E) -> scores (T, K) float32, ids (T, K), expert_counts (E) int32
  m.def(
      "top_k(Tensor logits, Tensor? selection_bias, int[] rule, float routed_scaling_factor, "
      "ScalarType ids_dtype) -> (Tensor scores, Tensor ids, Tensor expert_counts)");
  // logits (T, E), ids (T, K) -> scores (T, K) float32; 0 for ids outside [0, E)
  m.def("scores_at(Tensor logits, Tensor ids, int scoring, float routed_scaling_factor) -> Tensor");
  // Backward of both: dscores (T, K) -> dlogits (T, E) of `dtype`; logits only if the scoring's
  // rule reads them
  m.def(
      "top_k_backward(Tensor dscores, Tensor ids, Tensor scores, Tensor? logits, int E, "
      "int scoring, float routed_scaling_factor, ScalarType dtype) -> Tensor");

  // X (T, d), weight (E, d), bias (E) -> logits (T, E) of `dtype`, in one order of the sum for
  // every T
  m.def("router_logits(Tensor X, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor");

  // 10000 * major + 100 * minor + patch
  m.def("version() -> int");
  // The options in the lists `rule`, `numbers` after the rule, and `reals` (options.inc).
  m.def("option_names() -> (str[] rule, str[] numbers, str[] reals)");
  // The arrays of a routing of this kind as tilemoe_routing_layout returns them.
  m.def("routing_layout(int kind) -> (str[] names, int[] sizes, int[] more)");
  // By their numbers, as tilemoe/activations.inc states them.
  m.def("activation_formulas() -> str[]");
  // Settings of the process or a device, without a tensor: only the library with the CUDA backend
  // implements them.
  m.def("set_ctas_per_sm(int count) -> ()");
  m.def("set_arch(str arch) -> ()");
  m.def("arch_of(int device) -> str");
  // The capture of a CUDA graph that the current stream of a tensor's GPU is in; 0: none.
  m.def("capture_id(Tensor tensor) -> int");

  // A routing is one opaque int32 tensor, laid out by tilemoe_routing_bind.
  m.def(
      "route_logits(Tensor logits, Tensor? selection_bias, int[] rule, "
      "float routed_scaling_factor) -> (Tensor routing, Tensor expert_counts)");
  // Rows for `capacity` pairs: pairs past it, the highest experts' last tokens, are counted and
  // skipped.
  m.def("route_top_k(Tensor ids, Tensor scores, int E, SymInt capacity) -> Tensor");
  m.def("route_general(Tensor tokens, Tensor experts, Tensor scores, SymInt T, int E) -> Tensor");
  m.def(
      "route_rounded(Tensor logits, Tensor? seed, Tensor? offset, int K, int m, int rounding, "
      "int round_tokens) -> "
      "(Tensor routing, Tensor expert_counts)");
  m.def("route_grouped(Tensor counts, Tensor? row_scores, SymInt rows) -> Tensor");

  // X (T, d), or the grouped entry's rows -> O of X's shape, and H (capacity, 2n or n) if keep_H,
  // else empty. `router` is the tensor that the scores were computed from: logits under a scoring
  // rule, or, if scoring is -1, the scores themselves. It is not read; autograd passes its gradient
  // back. `overwrite_H` is for the backward, which then writes dH over H.
  m.def(
      "experts(Tensor X, Tensor? router, Tensor routing, Tensor?[] weights, Tensor? addend, "
      "SymInt capacity, int[] numbers, float[] reals, bool keep_H, bool overwrite_H) -> "
      "(Tensor O, Tensor H)");
  // route_logits and experts in one call of the host, which models use: (T, d), (T, E).
  m.def(
      "moe(Tensor X, Tensor logits, Tensor? selection_bias, Tensor?[] weights, Tensor? addend, "
      "int[] numbers, float[] reals, bool keep_H, bool overwrite_H) -> (Tensor O, Tensor H, "
      "Tensor routing, Tensor expert_counts)");
  // The same for a small T, with logits that it computes, rounded to `logits_dtype` and returned if
  // `wants_logits`, else empty. For inference: it has no gradient.
  m.def(
      "moe_tokens(Tensor X, Tensor router_weight, Tensor? router_bias, Tensor? selection_bias, "
      "Tensor?[] weights, Tensor? addend, int[] numbers, float[] reals, ScalarType logits_dtype, "
      "bool wants_logits) -> (Tensor O, Tensor routing, Tensor expert_counts, Tensor logits)");
  // `moe` with logits = X router_weight^T [+ router_bias], which it computes by torch's GEMM: (E, d),
  // (E), both in X's dtype.
  m.def(
      "moe_with_router(Tensor X, Tensor router_weight, Tensor? router_bias, "
      "Tensor? selection_bias, Tensor?[] weights, Tensor? addend, int[] numbers, float[] reals, "
      "bool keep_H, bool overwrite_H) -> (Tensor O, Tensor H, Tensor routing, "
      "Tensor expert_counts, Tensor logits)");
  // Its gradients whose bit is in `wanted`, in the order of experts_backward, with the gradient of
  // router_weight in the place of ds, and then, at bit 8, that of router_bias. `dlogits` (T, E) is
  // added to the logits' gradient, for example that of the losses. The router's part of dX is an
  // addend of the sum over the experts: dX is rounded once.
  m.def(
      "moe_with_router_backward(Tensor dO, Tensor? dlogits, Tensor X, Tensor H, Tensor routing, "
      "Tensor router_weight, Tensor?[] weights, Tensor? logits, int[] numbers, float[] reals, "
      "int wanted) -> Tensor[]");
  // The same, with dH written over H. If no memory is left for the gradients of W1 and b1,
  // `complete` is false and `made` has all others; experts_backward_over_H without dO then computes
  // them.
  m.def(
      "moe_with_router_backward_over_H(Tensor dO, Tensor? dlogits, Tensor X, Tensor(a!) H, "
      "Tensor routing, Tensor router_weight, Tensor?[] weights, Tensor? logits, int[] numbers, "
      "float[] reals, int wanted) -> (Tensor[] made, bool complete)");
  // The gradients whose bit is in `wanted` (TILEMOE_GRADIENT_), in that order: dX, ds, dW1, dW1_up,
  // dW2, db1, db1_up, db2. Others are not computed. Under a scoring rule, the result of
  // router_backward replaces ds: one call less for the host.
  m.def(
      "experts_backward(Tensor dO, Tensor X, Tensor H, Tensor routing, Tensor?[] weights, "
      "Tensor? logits, int[] numbers, float[] reals, ScalarType router_dtype, int wanted) -> "
      "Tensor[]");
  // The same, with dH written over H and the lowest peak of memory: W1's and b1's gradients are
  // allocated after the workspace of the others is freed. A weight's gradient that is given, its
  // bit in `places`, is written, or added to (accumulate); it is neither in `wanted` nor in `made`.
  // If no memory is left when H contains dH, `complete` is false and `made` has all but the
  // gradients of W1 and b1, with the unchanged ds; a call without dO then computes them.
  m.def(
      "experts_backward_over_H(Tensor? dO, Tensor X, Tensor(a!) H, Tensor routing, "
      "Tensor?[] weights, Tensor? logits, Tensor(b!)[] gradients, int places, int[] numbers, "
      "float[] reals, ScalarType router_dtype, int wanted, bool accumulate) -> (Tensor[] made, "
      "bool complete)");
  // As experts_backward, into the caller's memory, for tracing: a gradient that is absent is not
  // computed, those of weights are written, or added to (accumulate). dH is written over H_consumed
  // if it is given in place of H; a second call without dO then computes dW1 and db1, whose memory
  // need not exist before.
  m.def(
      "experts_backward_out(Tensor? dO, Tensor X, Tensor? H, Tensor(a!)? H_consumed, "
      "Tensor routing, Tensor?[] weights, Tensor(b!)[] gradients, int places, int[] numbers, "
      "float[] reals, bool accumulate) -> ()");
  // `experts` and experts_backward_over_H in parts, one call each (tilemoe_part), into the caller's
  // memory, without addend. bounds (parts + 1, E) int32: part p has rows [bounds[p, e],
  // bounds[p + 1, e]) of an expert; cuts: parts + 1 tokens, likewise. H is absent in inference.
  m.def(
      "experts_part(Tensor X, Tensor routing, Tensor?[] weights, Tensor bounds, int[] cuts, "
      "int part, int capacity, int[] numbers, float[] reals, Tensor(a!) O, Tensor(b!)? H) -> ()");
  // The call of the last part writes the gradients, without those of W1 and b1. All calls have one
  // workspace, of layer_bytes' `backward` bytes.
  m.def(
      "experts_backward_part(Tensor dO, Tensor X, Tensor(a!) H, Tensor routing, Tensor?[] weights, "
      "Tensor(b!)[] gradients, int places, Tensor bounds, int[] cuts, int part, int[] numbers, "
      "float[] reals, Tensor(c!) workspace) -> ()");

  // Low-rank adapters (tilemoe_lora). lora: A1, B1, A1_up, B1_up, A2, B2, whose ranks are multiples
  // of 8 -> bytes, as experts_lora reads them with weights of these strides, in `dtype`. formats:
  // those of quantised weights, or none.
  m.def(
      "pack_lora(Tensor?[] lora, Tensor?[] weights, int[] ranks, float[] scales, int[] formats, "
      "int[] numbers, ScalarType dtype) -> Tensor");
  // `experts` with adapters, with quantised weights, or with both. `lora` is not read: autograd
  // passes its gradients back. P1 (capacity, rank_1) and P2 (capacity, rank_2) are kept with H,
  // else empty. Without adapters the ranks are 0, and `packed` is empty; without quantised weights
  // `quantized` and `formats` are empty.
  m.def(
      "experts_lora(Tensor X, Tensor? router, Tensor routing, Tensor?[] weights, Tensor? addend, "
      "Tensor?[] lora, Tensor packed, Tensor?[] quantized, SymInt capacity, int[] ranks, "
      "float[] scales, int[] formats, int[] numbers, float[] reals, bool keep_H) -> "
      "(Tensor O, Tensor H, Tensor P1, Tensor P2)");
  // The gradients whose bit is in `wanted`: the eight of experts_backward, with ds itself, then
  // those of `lora`, of factor_dtype. Quantised weights have one only with a recipe of fp8, in the
  // dtype of their entry in `weights`.
  m.def(
      "experts_lora_backward(Tensor dO, Tensor X, Tensor H, Tensor P1, Tensor P2, Tensor routing, "
      "Tensor?[] weights, Tensor packed, Tensor?[] quantized, int[] ranks, float[] scales, "
      "int[] formats, int[] numbers, float[] reals, ScalarType factor_dtype, int wanted) -> "
      "Tensor[]");
  // The same, with dH written over H; without dO, the gradients of X, W1 and b1 from that dH. If H was
  // saved as codes, bytes with their scales, a call with dO overwrites these H_codes, and H is memory
  // for dH.
  m.def(
      "experts_lora_backward_over_H(Tensor? dO, Tensor X, Tensor(a!) H, Tensor P1, Tensor P2, "
      "Tensor routing, Tensor?[] weights, Tensor packed, Tensor?[] quantized, int[] ranks, "
      "float[] scales, int[] formats, int[] numbers, float[] reals, ScalarType factor_dtype, "
      "int wanted, Tensor(b!)? H_codes=None) -> Tensor[]");
  // values (E, R, C) -> codes (E, R, C), bytes, and scales (E, R/block_rows, C/128) float32
  m.def(
      "quantize_fp8(Tensor values, int block_rows, bool float_scales) -> (Tensor codes, "
      "Tensor scales)");
  // The same with blocks of 128 rows, into the caller's memory, with the transposed codes (E, C, R)
  // and scales if they are given.
  m.def(
      "quantize_fp8_into(Tensor values, bool float_scales, Tensor(a!) codes, "
      "Tensor(b!) block_scales, "
      "Tensor(c!)? transposed_codes, Tensor(d!)? transposed_scales) -> ()");
  // codes, scales, scale_map, scale_of_scales and scale_offset of one weight (tilemoe_quantized) ->
  // (E, R, C) of shape and dtype. It has no gradient.
  m.def("dequantize(Tensor?[] arrays, int format, int[] shape, ScalarType dtype) -> Tensor");
  // ds (T, K), or (pairs) of a rounded routing -> dlogits (T, E) of `dtype`
  m.def(
      "router_backward(Tensor ds, Tensor routing, Tensor? logits, int E, int[] rule, "
      "float routed_scaling_factor, ScalarType dtype) -> Tensor");

  // sizes: T, E, d, n, capacity. Bytes of a layer on `like`'s device and in its dtype: the routing,
  // H, the workspace of forward, the largest workspace of a backward with dH over H, and that of
  // dW1, which is computed last. formats: of quantised weights, or none.
  m.def(
      "layer_bytes(Tensor like, int[] sizes, int[] numbers, int[] formats) -> (int routing, int H, "
      "int forward, int backward, int dW1)");

  // logits (T, E), expert_counts (E) int32 -> (2) float32: balance, z
  m.def("router_losses(Tensor logits, Tensor expert_counts) -> Tensor");
  // (T, E) float32: the gradient of balance_coefficient * balance + z_coefficient * z
  m.def(
      "router_losses_backward(Tensor logits, Tensor expert_counts, float balance_coefficient, "
      "float z_coefficient) -> Tensor");

  // One GEMM of the layer (tilemoe_gathered_mm, tilemoe_combine_mm). kind and K are those of the
  // routing. X (T, d), or the grouped entry's rows; W (E, n, d), b (E, n) -> H (capacity, n).
  m.def(
      "gathered_mm(Tensor X, Tensor routing, Tensor W, Tensor? b, SymInt capacity, int kind, "
      "int K) -> Tensor");
  // The gradients whose bit is in `wanted`: 1 dX, 2 dW, 4 db.
  m.def(
      "gathered_mm_backward(Tensor dH, Tensor X, Tensor routing, Tensor W, int kind, int K, "
      "int wanted) -> Tensor[]");
  // A (capacity, n), W (E, d, n), b (E, d) -> O (T, d); T: the rows of the grouped entry, too.
  // `scores` is not read: autograd passes its gradient back.
  m.def(
      "combine_mm(Tensor A, Tensor? scores, Tensor routing, Tensor W, Tensor? b, Tensor? addend, "
      "SymInt T, int kind, int K) -> Tensor");
  // The gradients whose bit is in `wanted`: 1 dA, 2 ds, 4 dW, 8 db.
  m.def(
      "combine_mm_backward(Tensor dO, Tensor A, Tensor routing, Tensor W, Tensor? b, int kind, "
      "int K, int wanted) -> Tensor[]");

  // out (rows, d) = addend + the sum of the rows in place (rows, P) int32 of `sources`: addresses
  // of arrays (source_rows, d), which may be in other GPUs' memory. Row r of source s is
  // s * source_rows + r, any other number is no row. addend may be out. It has no gradient.
  m.def(
      "sum_rows(int[] sources, int source_rows, Tensor place, Tensor? addend, Tensor(a!) out) "
      "-> ()");

  // For `python -m tilemoe check` (verification.h), on `like`'s device.
  m.def("device_description(Tensor like) -> str");
  m.def("verification_cases(Tensor like, str[] patterns, str dtype, bool reduced) -> str");
  m.def("verify_case(Tensor like, str name, int seed, int repeats, bool backward) -> str");
}

TILEMOE_TORCH_LIBRARY_IMPL(TILEMOE_TORCH_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("version", TORCH_BOX(&version));
  m.impl("option_names", TORCH_BOX(&option_names));
  m.impl("routing_layout", TORCH_BOX(&routing_layout));
  m.impl("activation_formulas", TORCH_BOX(&activation_formulas));
}
