// The inputs of a case, as float32 values that the case's dtypes represent exactly.
#pragma once

#include <cstdint>
#include <vector>

#include "case.h"
#include "quantized.h"

namespace tilemoe::verify {

// Dense, and gate rows first for every layout of the case.
struct ExpertValues {
  std::vector<float> W1;  // (E, h_width, d)
  std::vector<float> W2;  // (E, d, n)
  std::vector<float> b1;  // (E, h_width); empty without biases
  std::vector<float> b2;  // (E, d); empty without biases
};

// The factors of adapters, dense. The rows of B1 are in W1's order here, gate rows first. When
// split, both adapters of W1 are one: A1 has the gate's rows, then up's; B1 has both on its
// diagonal, and zeros elsewhere.
struct LoraValues {
  std::vector<float> A1;  // (E, rank_1, d)
  std::vector<float> B1;  // (E, h_width, rank_1)
  std::vector<float> A2;  // (E, rank_2, n)
  std::vector<float> B2;  // (E, d, rank_2)
};
// Whether B1 has the column for the row: W1's adapters are apart when split.
bool has_factor(const Case& test_case, int64_t row, int64_t column);

// The quantised weights of a case, in its own layout; those that are not quantised are empty.
struct QuantizedValues {
  QuantizedArrays W1, W1_up, W2;
};

struct Inputs {
  Case test_case;
  // Grouped: rows past the sum of the counts are NaN, here and in every array of this length.
  std::vector<float> X;          // (outer_rows, d)
  std::vector<float> dO;         // (outer_rows, d)
  std::vector<float> O_addend;   // (outer_rows, d) or empty
  std::vector<float> dX_addend;  // (outer_rows, d) or empty
  ExpertValues weights;          // of quantised ones the values, rounded to the case's dtype
  ExpertValues
      dW_before;    // the weight gradients before backward; empty unless backward adds to them
  LoraValues lora;  // empty without adapters
  LoraValues dlora_before;  // as dW_before
  QuantizedValues quantized;

  // Top-K and rounded routing begin with the logits, (T, E); general routing with triples, grouped
  // routing with scores of the rows.
  std::vector<float> logits;
  std::vector<int64_t> tokens, experts;  // (pairs)
  std::vector<int64_t> bad_pairs;        // top-K: pairs whose chosen id is replaced by a bad one
  // (pairs), or (outer_rows) when grouped. Top-K: empty, or values that replace the chosen scores.
  std::vector<float> scores;

  int64_t pairs() const;
};

Inputs make_inputs(const Case& test_case, uint64_t seed);

// A (token, expert) pair that has a row.
struct Pair {
  int64_t index;  // of ds
  int64_t row;    // of H
  int64_t token;  // row of X and O
  int64_t expert;
  double score;
};

}  // namespace tilemoe::verify
