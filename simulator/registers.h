// The variables that a thread reads about itself without an instruction: threadIdx and the rest.
#pragma once

#include <vector_types.h>

namespace tilemoe::simulator {

struct Registers {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
};

// The running thread's registers. They do not change while it runs.
[[gnu::const]] const Registers& registers();

}  // namespace tilemoe::simulator
