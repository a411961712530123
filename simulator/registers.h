// What a thread reads of itself without an instruction: threadIdx and the rest.
#pragma once

#include <vector_types.h>

namespace tilemoe::simulator {

struct Registers {
  uint3 thread_index, block_index;
  dim3 block_size, grid_size;
};

// Of the running thread. The same as long as it runs.
[[gnu::const]] const Registers& registers();

}  // namespace tilemoe::simulator
