// Agents of the async proxy: an operation's accesses of memory, which take place at some time between
// an instruction and what waits for it, and which see ordinary writes only after a fence. Whatever is
// of that proxy makes one: TMA and wgmma here.
#pragma once

#include <cstdint>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// Whose accesses, up to which epoch.
struct AsyncAgent {
  uint32_t agent = 0;
  Epoch epoch = 0;
};

// Of an operation that `thread` starts now, whose accesses nothing orders but what waits for it.
Accessor new_operation(Thread& thread, uint32_t site);
// Of the products of the thread's warp that are committed next: among themselves they are in order.
Accessor warps_products(Thread& thread, uint32_t site);

// The thread has waited for it.
void know(Thread& thread, const AsyncAgent& agent);

}  // namespace tilemoe::simulator
