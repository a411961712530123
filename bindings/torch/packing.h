// The order of the lists that operators take. python/tilemoe/_layout.py and options.py write them:
// tests/torch/packing_test.py compares both sides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "call.h"

namespace tilemoe_torch {

// Tensor?[] weights: W1 (E, 2n, d) or (E, n, d), W1_up (E, n, d), W2 (E, d, n), each in either
// major; b1 and b1_up in W1's row order, b2 (E, d).
constexpr const char* kWeightNames[] = {"W1", "W1_up", "W2", "b1", "b1_up", "b2"};
constexpr size_t kW1 = 0, kW1Up = 1, kW2 = 2, kB1 = 3, kB1Up = 4, kB2 = 5, kWeights = 6;

// Tensor(a!)[] gradients, those whose bit is in `places`, and the returned ones, those in `wanted`,
// in the order of their bits. Absent gradients are not in the list: torch 2.11 cannot trace an
// operator that writes to a list with an absent tensor.
constexpr const char* kGradientNames[] = {"dX",  "ds",  "dW1",    "dW1_up",
                                          "dW2", "db1", "db1_up", "db2"};
constexpr size_t kDX = 0, kDs = 1, kDWeights = 2, kGradients = kDWeights + kWeights;

constexpr int64_t bit(size_t gradient) {
  return int64_t{1} << gradient;
}
static_assert(TILEMOE_GRADIENT_X == bit(kDX) && TILEMOE_GRADIENT_S == bit(kDs));
static_assert(TILEMOE_GRADIENT_W1 == bit(kDWeights + kW1));
static_assert(TILEMOE_GRADIENT_W1_UP == bit(kDWeights + kW1Up));
static_assert(TILEMOE_GRADIENT_W2 == bit(kDWeights + kW2));
static_assert(TILEMOE_GRADIENT_B1 == bit(kDWeights + kB1));
static_assert(TILEMOE_GRADIENT_B1_UP == bit(kDWeights + kB1Up));
static_assert(TILEMOE_GRADIENT_B2 == bit(kDWeights + kB2));

// Tensor?[] lora: the factors of low-rank adapters, shapes as in tilemoe_lora. Their gradients have
// bits of their own after those of the weights.
constexpr const char* kFactorNames[] = {"A1", "B1", "A1_up", "B1_up", "A2", "B2"};
constexpr size_t kA1 = 0, kFactorB1 = 1, kA1Up = 2, kFactorB1Up = 3, kA2 = 4, kFactorB2 = 5,
                 kFactors = 6;

// int[] ranks, of A1, A1_up and A2: multiples of 8, 0 without that adapter
struct LoraRanks {
  int64_t gate;
  int64_t up;
  int64_t down;
};

// Tensor?[] quantized: the arrays of the quantised weights W1, W1_up and W2, shapes as in
// tilemoe_quantized; or no tensors. In `weights` such a weight has a shape, and its data is not read.
constexpr const char* kArrayNames[] = {"codes", "scales", "scale_map", "scale_of_scales",
                                       "scale_offset"};
constexpr size_t kArrays = 5, kQuantizedWeights = 3;
constexpr const char* kQuantizedNames[] = {
    "W1.codes", "W1.scales", "W1.scale_map", "W1.scale_of_scales", "W1.scale_offset", "W1_up.codes",
    "W1_up.scales", "W1_up.scale_map", "W1_up.scale_of_scales", "W1_up.scale_offset", "W2.codes",
    "W2.scales", "W2.scale_map", "W2.scale_of_scales", "W2.scale_offset",
    // of the same weights, transposed, in the format fp8, for the backward of its recipe
    "W1_transposed.codes", "W1_transposed.scales", "W1_up_transposed.codes",
    "W1_up_transposed.scales", "W2_transposed.codes", "W2_transposed.scales"};
constexpr size_t kTransposedArrays = 2;  // codes and scales

// int[] formats: tilemoe_format of W1, W1_up and W2, and whether they are stored transposed; or no
// numbers
struct Formats {
  int64_t W1;
  int64_t W1_up;
  int64_t W2;
  int64_t W1_transposed;
  int64_t W1_up_transposed;
  int64_t W2_transposed;
};

// float[] scales
struct LoraScales {
  double of_W1;
  double of_W2;
};

// int[] rule: the kind of the routing and the rule that chooses experts. kind, scoring and
// group_score are tilemoe.h's enums; scoring is -1 if the scores were given.
struct Rule {
#define RULE(name) int64_t name;
#include "options.inc"
};

// int[] numbers: the rule's, then the experts' function; also tilemoe.h's enums.
struct Numbers {
  Rule rule;
#define NUMBER(name) int64_t name;
#include "options.inc"
};

// int[] sizes, of layer_bytes
struct Sizes {
  int64_t T;
  int64_t E;
  int64_t d;
  int64_t n;
  int64_t capacity;
};

// float[] reals
struct Reals {
#define REAL(name) double name;
#include "options.inc"
};

// Converts a list of numbers to the record with that number of fields.
template <typename Record, typename Number>
Record unpack(const char* name, const std::vector<Number>& list) {
  static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) % sizeof(Number) == 0);
  constexpr size_t kFields = sizeof(Record) / sizeof(Number);
  if (list.size() != kFields) refuse_length(name, list.size(), kFields);
  Record record;
  std::memcpy(&record, list.data(), sizeof record);
  return record;
}

}  // namespace tilemoe_torch
