// cp.async: copies that a thread starts and that land later.
#pragma once

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// Starts a copy of `size` bytes (4 or 16) to a shared address. The first `bytes` are read, the rest
// are zeros.
void start_copy(Thread& thread, uint32_t shared, const void* source, uint32_t bytes, uint32_t size,
                uint32_t site);
// Arrives at the barrier when the copies that the thread has started so far have landed.
void arrive_when_copied(Thread& thread, uint32_t barrier, uint32_t site);

}  // namespace tilemoe::simulator
