// Agents of the async proxy: an operation's accesses to memory, which take place at some time
// between an instruction and the wait for it, and which see ordinary writes only after a fence.
// TMA, wgmma and tcgen05.mma create such agents.
#pragma once

#include <cstdint>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// An agent's accesses up to an epoch.
struct AsyncAgent {
  uint32_t agent = 0;
  Epoch epoch = 0;
};

// An operation that `thread` starts now. Only a wait for it orders its accesses.
Accessor new_operation(Thread& thread, uint32_t site);
// The MMAs of the thread's warp that are committed next; they are in order among themselves.
Accessor warp_mmas(Thread& thread, uint32_t site);

// Records that the thread has waited for it.
void know(Thread& thread, const AsyncAgent& agent);

}  // namespace tilemoe::simulator
