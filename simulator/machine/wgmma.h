// wgmma: a warp's part of its warpgroup's products.
#pragma once

#include <cstdint>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator {

struct ProductShape {
  bool bfloat16;
  int columns;
  bool a_mn_major, b_mn_major;
};

// The warp's 16 rows of D (64, columns) += A B^T, by the descriptors of A and B. `d` is the lane's
// columns / 2 numbers of D: from now on they are the tensor core's, until the product has been
// waited for. A thread that reads them before finds NaN.
void multiply_group(Thread& thread, const ProductShape& shape, float* d, uint64_t a, uint64_t b,
                    bool accumulate, uint32_t site);
void fence_products(Thread& thread, uint32_t site);
void commit_products(Thread& thread, uint32_t site);
// Until at most `pending` of the warp's groups are under way.
void wait_for_products(Thread& thread, size_t pending, uint32_t site);

}  // namespace tilemoe::simulator
