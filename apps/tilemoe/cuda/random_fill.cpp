#include "cuda/random_fill.h"

#include <algorithm>
#include <vector>

#include "bench_memory.h"

namespace tilemoe::app {

void fill_normal(DeviceBuffer& buffer, DType dtype, double scale, uint64_t seed) {
  constexpr int64_t kBlock = 4194301;  // prime: no two rows begin at the same place of the block
  const size_t block_bytes = size_of(dtype) * static_cast<size_t>(kBlock);
  std::vector<std::byte> block(block_bytes);
  fill_normal(dtype, block.data(), kBlock, scale, seed);
  buffer.write(block.data(), std::min(block_bytes, buffer.bytes()));
  for (size_t have = block_bytes; have < buffer.bytes(); have *= 2)
    check_cuda(cudaMemcpy(static_cast<std::byte*>(buffer.data()) + have, buffer.data(),
                          std::min(have, buffer.bytes() - have), cudaMemcpyDeviceToDevice),
               "a copy on the GPU");
}

}  // namespace tilemoe::app
