// cp.async: copies that a thread starts and that land later.
#pragma once

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// Of `bytes` (0 or 16) bytes to 16 at a shared address; zeros for the rest.
void start_copy(Thread& thread, uint32_t shared, const void* source, uint32_t bytes, uint32_t site);
// One of the barrier's arrivals, when what the thread has started so far has landed.
void arrive_when_copied(Thread& thread, uint32_t barrier, uint32_t site);

}  // namespace tilemoe::simulator
