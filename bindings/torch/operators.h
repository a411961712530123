// The operators, one function each, the same for every device. Symbols as in tilemoe.h; integers
// that name a rule (kind, scoring, rounding, activation, gate_layout) are its enums. What each does
// and which shapes it takes is told once, in schema.cpp.
#pragma once

#include <tuple>
#include <vector>

#include "call.h"

namespace tilemoe_torch {

using MaybeTensor = std::optional<Tensor>;

// router.cpp
std::tuple<Tensor, Tensor, Tensor> top_k(Tensor logits, MaybeTensor selection_bias, int64_t K,
                                         int64_t scoring, ScalarType ids_dtype);
Tensor top_k_backward(Tensor dscores, Tensor ids, Tensor scores, MaybeTensor logits, int64_t E,
                      int64_t scoring, ScalarType dtype);
Tensor router_backward(Tensor ds, Tensor routing, MaybeTensor logits, int64_t kind, int64_t E,
                       int64_t K, int64_t scoring, ScalarType dtype);
Tensor router_losses(Tensor logits, Tensor expert_counts);
Tensor router_losses_backward(Tensor logits, Tensor expert_counts, double balance_coefficient,
                              double z_coefficient);

// routing.cpp
std::tuple<Tensor, Tensor> route_logits(Tensor logits, MaybeTensor selection_bias, int64_t K,
                                        int64_t scoring);
Tensor route_top_k(Tensor ids, Tensor scores, int64_t E);
Tensor route_general(Tensor tokens, Tensor experts, Tensor scores, int64_t T, int64_t E);
std::tuple<Tensor, Tensor> route_rounded(Tensor logits, MaybeTensor seed, MaybeTensor offset,
                                         int64_t K, int64_t m, int64_t rounding);
Tensor route_grouped(Tensor counts, MaybeTensor row_scores, int64_t rows);

// experts.cpp
std::tuple<Tensor, Tensor> experts(Tensor X, MaybeTensor router, Tensor routing, Tensor W1,
                                   MaybeTensor W1_up, Tensor W2, MaybeTensor b1, MaybeTensor b1_up,
                                   MaybeTensor b2, MaybeTensor addend, int64_t kind, int64_t K,
                                   int64_t capacity, int64_t scoring, int64_t activation,
                                   int64_t gate_layout, double clamp, double alpha, double up_shift,
                                   int64_t column_blocks, bool keep_H, bool overwrite_H);
std::tuple<Tensor, Tensor, Tensor, Tensor> moe(
    Tensor X, Tensor logits, MaybeTensor selection_bias, Tensor W1, MaybeTensor W1_up, Tensor W2,
    MaybeTensor b1, MaybeTensor b1_up, MaybeTensor b2, MaybeTensor addend, int64_t K,
    int64_t scoring, int64_t activation, int64_t gate_layout, double clamp, double alpha,
    double up_shift, int64_t column_blocks, bool keep_H, bool overwrite_H);
std::vector<Tensor> experts_backward(Tensor dO, Tensor X, Tensor H, Tensor routing, Tensor W1,
                                     MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                                     MaybeTensor b1_up, MaybeTensor b2, MaybeTensor logits,
                                     int64_t kind, int64_t K, int64_t scoring,
                                     ScalarType router_dtype, int64_t activation,
                                     int64_t gate_layout, double clamp, double alpha,
                                     double up_shift, int64_t column_blocks, int64_t wanted);
std::tuple<std::vector<Tensor>, bool> experts_backward_over_H(
    MaybeTensor dO, Tensor X, Tensor H, Tensor routing, Tensor W1, MaybeTensor W1_up, Tensor W2,
    MaybeTensor b1, MaybeTensor b1_up, MaybeTensor b2, MaybeTensor logits, MaybeTensor dW1,
    MaybeTensor dW1_up, MaybeTensor dW2, MaybeTensor db1, MaybeTensor db1_up, MaybeTensor db2,
    int64_t kind, int64_t K, int64_t scoring, ScalarType router_dtype, int64_t activation,
    int64_t gate_layout, double clamp, double alpha, double up_shift, int64_t column_blocks,
    int64_t wanted, bool accumulate);
void experts_backward_out(MaybeTensor dO, Tensor X, MaybeTensor H, MaybeTensor H_consumed,
                          Tensor routing, Tensor W1, MaybeTensor W1_up, Tensor W2, MaybeTensor b1,
                          MaybeTensor b1_up, MaybeTensor b2, MaybeTensor dX, MaybeTensor ds,
                          MaybeTensor dW1, MaybeTensor dW1_up, MaybeTensor dW2, MaybeTensor db1,
                          MaybeTensor db1_up, MaybeTensor db2, int64_t kind, int64_t K,
                          int64_t activation, int64_t gate_layout, double clamp, double alpha,
                          double up_shift, int64_t column_blocks, bool accumulate);

}  // namespace tilemoe_torch
