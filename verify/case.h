// One case of the registry: a layer, its routing, its data and the outputs that it computes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tilemoe/layer.h"

namespace tilemoe::verify {

enum class RoutingKind { kTopK, kGeneral, kRounded, kGrouped };

// How tokens spread over experts.
enum class Load {
  kRandom,
  kZipf,       // popularity falls as 1 / (e + 1)^2
  kOneExpert,  // every token chooses expert E / 2 first
  kHalfEmpty,  // experts of odd number get no token
};

enum class Data {
  kUnitScale,  // x ~ N(0, 1), W ~ N(0, 1 / fan-in)
  kIntegers,   // small whole numbers: every sum is exact in float32
  kBench,      // x = 0.2 N(0, 1), W = 0.02 N(0, 1): the scale of a layer in training
};

// The gradients that backward computes; those of biases and adapters only if the case has them.
struct Gradients {
  bool dX = true, dW1 = true, dW2 = true, db1 = true, db2 = true, ds = true;
  bool lora_1 = true, lora_2 = true;  // dA and dB of W1's adapters, and of W2's
};

// Low-rank adapters: their ranks, 0 without one. `gate` is W1's, `up` is W1_up's when split.
struct Adapters {
  int32_t gate = 0, up = 0, down = 0;
  // Few bits: the product with a 16-bit factor is exact in float32. That of 0.7, say, is nearly a
  // tie for one factor in ten, which float32 rounds to a tie: to another value than float64 rounds.
  float scale_1 = 0.6875f, scale_2 = 1.375f;
  bool float32_factors = false;  // A and B in float32 for every dtype
  bool transposed = false;       // A, B and their gradients: the last dimension but one contiguous

  int32_t rank_1() const { return gate + up; }
  int32_t rank_2() const { return down; }
  bool any() const { return rank_1() > 0 || rank_2() > 0; }
};

struct Case {
  std::string name = {};
  // K: experts per token; general routing: pairs per token on average. T is 0 for grouped routing.
  int64_t T = 0, d = 0, n = 0, E = 0, K = 0;
  DType dtype = DType::kFloat32;
  Data data = Data::kUnitScale;

  Activation activation = Activation::kSwiGLU;
  float clamp = 0, alpha = 0, up_shift = 0;
  GateLayout gate_layout = GateLayout::kConcatenated;
  bool W1_transposed = false, W2_transposed = false;
  bool biases = false;
  Adapters lora = {};
  Format format_1 = Format::kNone, format_2 = Format::kNone;  // of W1 and W1_up, and of W2
  int32_t weight_blocks = 0;
  Recipe recipe = Recipe::kBf16;
  bool float_scales = false;        // of X and A in the fp8 recipe; its weights have powers of two
  Format format_H = Format::kNone;  // of the saved H
  bool padded = false;              // gaps between rows and experts: strides larger than dense ones

  RoutingKind routing = RoutingKind::kTopK;
  Scoring scoring = Scoring::kSoftmaxOverChosen;
  Rounding rounding = Rounding::kNearest;
  int64_t m = 0;                     // rounded
  std::vector<int64_t> counts = {};  // grouped: rows of each expert
  int64_t spare_rows = 0;            // grouped: rows past the sum of the counts
  bool row_scores = true;            // grouped
  Load load = Load::kRandom;
  int64_t capacity = 0;  // 0: the routing's own bound
  bool bad_ids = false;  // some ids lie outside [0, E)
  DType id_dtype = DType::kInt32;
  DType score_dtype = DType::kFloat32;

  bool addend = false;         // to O and to dX
  bool float32_dW = false;     // gradients of weights and adapters in float32 for every dtype
  bool accumulate_dW = false;  // beta = 1
  bool dH_over_H = false;
  bool in_two_calls = false;  // backward: the outputs that need dO, then the rest; addend in dX
  bool in_parts = false;      // parts of the tokens, one of them empty, not in their order
  bool gemms_apart = false;   // gathered_mm and combine_mm; the activation is the identity
  int32_t column_blocks = 0;  // of Y and dX~
  Gradients wanted = {};

  bool reduced = false;    // small enough for runs under a sanitizer
  bool huge = false;       // more than 2^31 elements: run by name only
  bool too_large = false;  // for a whole reference: compared by a small hidden layer (large.h)

  bool gated() const {
    return tilemoe_activation_gated(static_cast<tilemoe_activation>(activation)) != 0;
  }
  int64_t h_width() const { return gated() ? 2 * n : n; }
  // Rows of X and O.
  int64_t outer_rows() const;
  DType factor_dtype() const { return lora.float32_factors ? DType::kFloat32 : dtype; }
  DType dW_dtype() const { return float32_dW ? DType::kFloat32 : dtype; }
  RoutingSpec spec(int64_t pairs, Device device) const;
  Experts experts(Device device) const;
};

}  // namespace tilemoe::verify
