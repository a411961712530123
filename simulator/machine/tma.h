// TMA: boxes of a tensor map between global and shared memory.
#pragma once

#include <cstdint>
#include <span>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// Loads a box to the same place in each CTA of the cluster whose bit is set in `blocks`, and counts
// its bytes at the barrier there.
void load_box(Thread& thread, uint32_t shared, const void* map, uint32_t barrier, uint32_t blocks,
              std::span<const int32_t> coordinates, uint32_t site);

void store_box(Thread& thread, const void* map, uint32_t shared,
               std::span<const int32_t> coordinates, uint32_t site);
void commit_stores(Thread& thread);
// Waits until at most `pending` groups still have to read shared memory; `complete`: to finish.
void wait_for_stores(Thread& thread, size_t pending, bool complete, uint32_t site);

}  // namespace tilemoe::simulator
