// Simulated: the shared memory that a launch asks for (src/cuda/ptx/dynamic_shared.h).
#pragma once

#define TILEMOE_DYNAMIC_SHARED(type, name, alignment) \
  type* const name = static_cast<type*>(::tilemoe::simulator::dynamic_shared())
