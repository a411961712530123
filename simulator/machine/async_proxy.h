// The async proxy: TMA and wgmma, whose accesses of shared memory take place at some time between
// an instruction and what waits for it, and which see ordinary writes only after a fence.
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

// A warp's 16 rows of D (64, columns) += A B^T. `d` is a lane's columns / 2 numbers.
void multiply_group(Thread& thread, bool bfloat16, int columns, float* d, uint64_t a, uint64_t b,
                    bool accumulate, bool a_mn_major, bool b_mn_major, uint32_t site);
void fence_products(Thread& thread, uint32_t site);
void commit_products(Thread& thread, uint32_t site);
// Until at most `pending` of the warp's groups are under way.
void wait_for_products(Thread& thread, size_t pending, uint32_t site);

void cluster_barrier(Thread& thread, uint32_t site);
void end_cluster_barrier(Block& first);

}  // namespace tilemoe::simulator
