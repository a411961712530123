// The layer by plain loops, straight from the formulas of docs/mathematics.md: what the library is
// held to.
#pragma once

#include <array>
#include <vector>

#include "inputs.h"

namespace tilemoe::verify {

// What a case is compared by.
enum Output { kH, kO, kDX, kDs, kDW1, kDW2, kDb1, kDb2, kOutputs };
const char* output_name(Output output);

// One array for each output, empty where the case does not ask for it. Layouts are those of Inputs;
// H has the rows that exist, (M, h_width), and ds is (pairs).
using Results = std::array<std::vector<double>, kOutputs>;

// Whether the case asks for it. H of a huge case is left out: it would be tens of gigabytes.
bool wanted(const Case& test_case, Output output);
// Whether the forward pass writes it.
bool of_forward(Output output);
// Elements of a row, by which errors are judged. ds has no rows: a token's few sums may all cancel,
// in any precision, so it goes by runs of pairs.
int64_t row_width(const Case& test_case, Output output);

enum class Precision {
  kExact,    // float64 throughout
  kRounded,  // float64, rounded to the case's dtypes wherever the library stores a tensor
  kFloat32,  // float32 throughout: a plain pipeline, one operation after the other
};

// In which order a sum takes its terms: float32's error depends on it.
enum class SumOrder { kAscending, kDescending };

Results evaluate(const Inputs& inputs, const std::vector<Pair>& pairs, Precision precision,
                 SumOrder order = SumOrder::kAscending);

}  // namespace tilemoe::verify
