#include "train/ops/partial_sums.h"

namespace tilemoe::train {

void sum_partials(ConstFloats partials, int64_t parts, Floats out) {
  constexpr int64_t kColumnsPerTask = 4096;
  const auto width = std::ssize(out);
  parallel_for(ceil_div(width, kColumnsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask, last = std::min(width, first + kColumnsPerTask);
    float* const sum = out.data();
    std::copy(partials.data() + first, partials.data() + last, sum + first);
    for (int64_t part = 1; part < parts; ++part) {
      const float* const addend = partials.data() + part * width;
      for (int64_t i = first; i < last; ++i) sum[i] += addend[i];
    }
  });
}

}  // namespace tilemoe::train
