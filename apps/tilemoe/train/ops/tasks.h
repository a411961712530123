// How the trainer's loops are cut into tasks: by the problem alone, so that every sum has the same
// order for every number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "train/parallel.h"

namespace tilemoe::train {

using Floats = std::span<float>;
using ConstFloats = std::span<const float>;
using ConstBytes = std::span<const uint8_t>;

// Widths that the trainer's loops see are multiples of this: the lanes of the widest vector.
inline constexpr int64_t kRowMultiple = 16;
// Enough work to outweigh waking a thread, few enough rows that a batch feeds many cores.
inline constexpr int64_t kRowsPerTask = 128;

inline constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
inline int64_t row_tasks(int64_t rows) {
  return ceil_div(rows, kRowsPerTask);
}

// body(first, last, task) for consecutive blocks of at most kRowsPerTask rows.
template <class Body>
void for_row_blocks(int64_t rows, Body&& body) {
  parallel_for(row_tasks(rows), [&](int64_t task, int) {
    const int64_t first = task * kRowsPerTask;
    body(first, std::min(rows, first + kRowsPerTask), task);
  });
}

}  // namespace tilemoe::train
