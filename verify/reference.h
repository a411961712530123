// The layer in plain loops, directly from the formulas of docs/mathematics.md: the reference for
// the library.
#pragma once

#include <array>
#include <vector>

#include "inputs.h"

namespace tilemoe::verify {

// The outputs that a case compares.
enum Output { kH, kO, kDX, kDs, kDW1, kDW2, kDb1, kDb2, kDA1, kDB1, kDA2, kDB2, kOutputs };
const char* output_name(Output output);

// One array for each output, empty if the case does not compute it. Layouts are those of Inputs;
// H has the rows that exist, (M, h_width), and ds is (pairs). kDB1 and kDB2 are of the adapters' B,
// kDb1 and kDb2 of the biases.
using Results = std::array<std::vector<double>, kOutputs>;

// Whether the case compares it. H of a huge case is left out: it would be tens of gigabytes.
bool wanted(const Case& test_case, Output output);
// Whether the forward pass writes it.
bool of_forward(Output output);
// Elements of a row, the unit in which errors are measured. ds has no rows: a token's few sums may
// all cancel, in any precision, so its rows are runs of pairs.
int64_t row_width(const Case& test_case, Output output);

enum class Precision {
  kExact,    // float64 throughout
  kRounded,  // float64, rounded to the case's dtypes wherever the library stores a tensor
  kFloat32,  // float32 throughout: a plain pipeline, one operation after the other
};

// The order of the terms of a sum: float32's error depends on it.
enum class SumOrder { kAscending, kDescending };

Results evaluate(const Inputs& inputs, const std::vector<Pair>& pairs, Precision precision,
                 SumOrder order = SumOrder::kAscending);

}  // namespace tilemoe::verify
