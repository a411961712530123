// Factors of adapters whose GEMMs round nothing: each of their rows has one number, a power of two. The
// bits of a pass with adapters then depend on no order of sums.
#pragma once

#include <cstdint>
#include <vector>

#include "verify/inputs.h"

namespace tilemoe::test {

inline void thin_factors(verify::Inputs& inputs) {
  const verify::Case& one = inputs.test_case;
  const auto thin = [](std::vector<float>& values, int64_t rows, int64_t columns,
                       const auto& place) {
    for (size_t i = 0; i < values.size(); ++i) {
      const auto at = static_cast<int64_t>(i);
      const int64_t row = at / columns % rows;
      const float number = row % 3 != 0 ? 0.5f : -2.f;
      values[i] = at % columns == place(row) ? number : 0.f;
    }
  };
  const auto of_row = [](int64_t columns) {
    return [columns](int64_t row) { return (5 * row + 3) % columns; };
  };
  // When split, the up rows have the second part of the rank.
  const bool split = one.gate_layout == GateLayout::kSplit;
  const auto of_B1 = [&](int64_t row) {
    if (!split) return row % one.lora.gate;
    if (row < one.n) return one.lora.gate > 0 ? row % one.lora.gate : int64_t{-1};
    return one.lora.up > 0 ? one.lora.gate + row % one.lora.up : int64_t{-1};
  };
  const int32_t rank_1 = one.lora.rank_1(), rank_2 = one.lora.rank_2();
  thin(inputs.lora.A1, rank_1, one.d, of_row(one.d));
  thin(inputs.lora.B1, one.h_width(), rank_1, of_B1);
  thin(inputs.lora.A2, rank_2, one.n, of_row(one.n));
  thin(inputs.lora.B2, one.d, rank_2, of_row(rank_2));
}

}  // namespace tilemoe::test
