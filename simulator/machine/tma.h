// TMA: boxes of a tensor map between global and shared memory.
#pragma once

#include <cstdint>
#include <span>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

// A box to the same place of every block of the cluster whose bit is set in `blocks`, and its bytes
// to the barrier there.
void load_box(Thread& thread, uint32_t shared, const void* map, uint32_t barrier, uint32_t blocks,
              std::span<const int32_t> coordinates, uint32_t site);

void store_box(Thread& thread, const void* map, uint32_t shared,
               std::span<const int32_t> coordinates, uint32_t site);
void commit_stores(Thread& thread);
// Until at most `pending` groups have yet to read their shared memory; of `complete`, to be done.
void wait_for_stores(Thread& thread, size_t pending, bool complete, uint32_t site);

}  // namespace tilemoe::simulator
