// wgmma: a warp's part of its warpgroup's MMAs.
#pragma once

#include <cstdint>

#include "simulator/machine/machine.h"
#include "simulator/tensor_core.h"

namespace tilemoe::simulator {

struct MmaShape {
  OperandType type;
  int columns;
  bool a_mn_major, b_mn_major;
};

// The warp's 16 rows of D (64, columns) += A B^T, by the descriptors of A and B. `d` is the lane's
// columns / 2 numbers of D: from now on they belong to the tensor core, until the MMA has been
// waited for. A thread that reads them earlier reads NaN.
void multiply_group(Thread& thread, const MmaShape& shape, float* d, uint64_t a, uint64_t b,
                    bool accumulate, uint32_t site);
void fence_mmas(Thread& thread, uint32_t site);
void commit_mmas(Thread& thread, uint32_t site);
// Waits until at most `pending` of the warp's groups are under way.
void wait_for_mmas(Thread& thread, size_t pending, uint32_t site);

}  // namespace tilemoe::simulator
