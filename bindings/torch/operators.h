// The operators, one function each, the same for every device. Symbols as in tilemoe.h; integers
// that name a rule (kind, scoring, rounding, activation, gate_layout) are its enums. schema.cpp
// documents the function and the shapes of each operator, packing.h the order of lists.
#pragma once

#include <tuple>
#include <vector>

#include "call.h"

namespace tilemoe_torch {

// router.cpp
Tensor router_logits(const Tensor& X, const Tensor& weight, const MaybeTensor& bias,
                     ScalarType dtype);
std::tuple<Tensor, Tensor, Tensor> top_k(const Tensor& logits, const MaybeTensor& selection_bias,
                                         const std::vector<int64_t>& rule,
                                         double routed_scaling_factor, ScalarType ids_dtype);
Tensor scores_at(const Tensor& logits, const Tensor& ids, int64_t scoring,
                 double routed_scaling_factor);
Tensor top_k_backward(const Tensor& dscores, const Tensor& ids, const Tensor& scores,
                      const MaybeTensor& logits, int64_t E, int64_t scoring,
                      double routed_scaling_factor, ScalarType dtype);
Tensor router_backward(const Tensor& ds, const Tensor& routing, const MaybeTensor& logits,
                       int64_t E, const std::vector<int64_t>& rule, double routed_scaling_factor,
                       ScalarType dtype);
Tensor router_losses(const Tensor& logits, const Tensor& expert_counts);
Tensor router_losses_backward(const Tensor& logits, const Tensor& expert_counts,
                              double balance_coefficient, double z_coefficient);

// routing.cpp
std::tuple<Tensor, Tensor> route_logits(const Tensor& logits, const MaybeTensor& selection_bias,
                                        const std::vector<int64_t>& rule,
                                        double routed_scaling_factor);
Tensor route_top_k(const Tensor& ids, const Tensor& scores, int64_t E, int64_t capacity);
Tensor route_general(const Tensor& tokens, const Tensor& experts, const Tensor& scores, int64_t T,
                     int64_t E);
std::tuple<Tensor, Tensor> route_rounded(const Tensor& logits, const MaybeTensor& seed,
                                         const MaybeTensor& offset, int64_t K, int64_t m,
                                         int64_t rounding, int64_t round_tokens);
Tensor route_grouped(const Tensor& counts, const MaybeTensor& row_scores, int64_t rows);

// experts.cpp
std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t> layer_bytes(
    const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& numbers,
    const std::vector<int64_t>& formats);
std::tuple<Tensor, Tensor> experts(const Tensor& X, const MaybeTensor& router,
                                   const Tensor& routing, const Tensors& weights,
                                   const MaybeTensor& addend, int64_t capacity,
                                   const std::vector<int64_t>& numbers,
                                   const std::vector<double>& reals, bool keep_H, bool overwrite_H);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe(const Tensor& X, const Tensor& logits,
                                               const MaybeTensor& selection_bias,
                                               const Tensors& weights, const MaybeTensor& addend,
                                               const std::vector<int64_t>& numbers,
                                               const std::vector<double>& reals, bool keep_H,
                                               bool overwrite_H);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_tokens(
    const Tensor& X, const Tensor& router_weight, const MaybeTensor& router_bias,
    const MaybeTensor& selection_bias, const Tensors& weights, const MaybeTensor& addend,
    const std::vector<int64_t>& numbers, const std::vector<double>& reals, ScalarType logits_dtype,
    bool wants_logits);
std::vector<Tensor> experts_backward(const Tensor& dO, const Tensor& X, const Tensor& H,
                                     const Tensor& routing, const Tensors& weights,
                                     const MaybeTensor& logits, const std::vector<int64_t>& numbers,
                                     const std::vector<double>& reals, ScalarType router_dtype,
                                     int64_t wanted);
std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    const MaybeTensor& dO, const Tensor& X, const Tensor& H, const Tensor& routing,
    const Tensors& weights, const MaybeTensor& logits, const std::vector<Tensor>& gradients,
    int64_t places, const std::vector<int64_t>& numbers, const std::vector<double>& reals,
    ScalarType router_dtype, int64_t wanted, bool accumulate);
void experts_backward_out(const MaybeTensor& dO, const Tensor& X, const MaybeTensor& H,
                          const MaybeTensor& H_consumed, const Tensor& routing,
                          const Tensors& weights, const std::vector<Tensor>& gradients,
                          int64_t places, const std::vector<int64_t>& numbers,
                          const std::vector<double>& reals, bool accumulate);
void experts_part(const Tensor& X, const Tensor& routing, const Tensors& weights,
                  const Tensor& bounds, const std::vector<int64_t>& cuts, int64_t part,
                  int64_t capacity, const std::vector<int64_t>& numbers,
                  const std::vector<double>& reals, const Tensor& O, const MaybeTensor& H);
void experts_backward_part(const Tensor& dO, const Tensor& X, const Tensor& H,
                           const Tensor& routing, const Tensors& weights,
                           const std::vector<Tensor>& gradients, int64_t places,
                           const Tensor& bounds, const std::vector<int64_t>& cuts, int64_t part,
                           const std::vector<int64_t>& numbers, const std::vector<double>& reals,
                           const Tensor& workspace);

// with_router.cpp
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> moe_with_router(
    const Tensor& X, const Tensor& router_weight, const MaybeTensor& router_bias,
    const MaybeTensor& selection_bias, const Tensors& weights, const MaybeTensor& addend,
    const std::vector<int64_t>& numbers, const std::vector<double>& reals, bool keep_H,
    bool overwrite_H);
std::vector<Tensor> moe_with_router_backward(const Tensor& dO, const MaybeTensor& dlogits,
                                             const Tensor& X, const Tensor& H,
                                             const Tensor& routing, const Tensor& router_weight,
                                             const Tensors& weights, const MaybeTensor& logits,
                                             const std::vector<int64_t>& numbers,
                                             const std::vector<double>& reals, int64_t wanted);
std::tuple<std::vector<Tensor>, bool> moe_with_router_backward_over_H(
    const Tensor& dO, const MaybeTensor& dlogits, const Tensor& X, const Tensor& H,
    const Tensor& routing, const Tensor& router_weight, const Tensors& weights,
    const MaybeTensor& logits, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, int64_t wanted);

// lora.cpp
Tensor pack_lora(const Tensors& lora, const Tensors& weight_list, const std::vector<int64_t>& ranks,
                 const std::vector<double>& scales, const std::vector<int64_t>& formats,
                 const std::vector<int64_t>& numbers, ScalarType dtype);
std::tuple<Tensor, Tensor, Tensor, Tensor> experts_lora(
    const Tensor& X, const MaybeTensor& router, const Tensor& routing, const Tensors& weight_list,
    const MaybeTensor& addend, const Tensors& lora, const Tensor& packed, const Tensors& quantized,
    int64_t capacity, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, bool keep_H);
std::vector<Tensor> experts_lora_backward(
    const Tensor& dO, const Tensor& X, const Tensor& H, const Tensor& P1, const Tensor& P2,
    const Tensor& routing, const Tensors& weight_list, const Tensor& packed,
    const Tensors& quantized, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, ScalarType factor_dtype, int64_t wanted);
std::vector<Tensor> experts_lora_backward_over_H(
    const MaybeTensor& dO, const Tensor& X, const Tensor& H, const Tensor& P1, const Tensor& P2,
    const Tensor& routing, const Tensors& weight_list, const Tensor& packed,
    const Tensors& quantized, const std::vector<int64_t>& ranks, const std::vector<double>& scales,
    const std::vector<int64_t>& formats, const std::vector<int64_t>& numbers,
    const std::vector<double>& reals, ScalarType factor_dtype, int64_t wanted,
    const MaybeTensor& H_codes);

// quantized.cpp
std::tuple<Tensor, Tensor> quantize_fp8(const Tensor& values, int64_t block_rows,
                                        bool float_scales);
void quantize_fp8_into(const Tensor& values, bool float_scales, const Tensor& codes,
                       const Tensor& scales, const MaybeTensor& transposed_codes,
                       const MaybeTensor& transposed_scales);
Tensor dequantize(const Tensors& arrays, int64_t format, const std::vector<int64_t>& shape,
                  ScalarType dtype);

// mm.cpp
Tensor gathered_mm(const Tensor& X, const Tensor& routing, const Tensor& W, const MaybeTensor& b,
                   int64_t capacity, int64_t kind, int64_t K);
std::vector<Tensor> gathered_mm_backward(const Tensor& dH, const Tensor& X, const Tensor& routing,
                                         const Tensor& W, int64_t kind, int64_t K, int64_t wanted);
Tensor combine_mm(const Tensor& A, const MaybeTensor& scores, const Tensor& routing,
                  const Tensor& W, const MaybeTensor& b, const MaybeTensor& addend, int64_t T,
                  int64_t kind, int64_t K);
std::vector<Tensor> combine_mm_backward(const Tensor& dO, const Tensor& A, const Tensor& routing,
                                        const Tensor& W, const MaybeTensor& b, int64_t kind,
                                        int64_t K, int64_t wanted);

// rows.cpp
void sum_rows(const std::vector<int64_t>& sources, int64_t source_rows, const Tensor& place,
              const MaybeTensor& addend, const Tensor& out);

}  // namespace tilemoe_torch
