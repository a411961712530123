// A batch: T = count * length tokens, sequence after sequence.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

struct Sequences {
  int64_t count = 0;
  int64_t length = 0;

  int64_t tokens() const { return count * length; }
};

}  // namespace tilemoe::train
