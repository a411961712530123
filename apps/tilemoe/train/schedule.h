// The learning rate's course: linear warm-up, then a cosine down to a fraction of the peak.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace tilemoe::train {

struct Schedule {
  int64_t steps = 0;
  int64_t warm_up = 0;
  double final_fraction = 0.05;

  // Factor of the peak learning rate in update `step`; the first is 1, the last `steps`.
  double factor(int64_t step) const {
    if (step <= warm_up) return static_cast<double>(step) / static_cast<double>(warm_up);
    const double progress = static_cast<double>(step - warm_up) /
                            static_cast<double>(std::max<int64_t>(1, steps - warm_up));
    return final_fraction +
           (1 - final_fraction) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
  }
};

}  // namespace tilemoe::train
