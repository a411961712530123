// Sums over the batch, in an order that no number of threads changes: each task adds up its own
// rows, then the tasks' sums are added in the tasks' order.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

// out[i] = sum over p of partials[p][i]
void sum_partials(ConstFloats partials,  // (parts, size of out)
                  int64_t parts, Floats out);

}  // namespace tilemoe::train
