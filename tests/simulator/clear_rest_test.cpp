// Zeros in rows without a token, on a simulated GPU: all of them, and no other byte.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "cuda/kernels/kernels.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"

namespace tilemoe::test {
namespace {

constexpr uint16_t kNan = 0x7fc1;
constexpr int64_t kGuard = 64;  // elements behind the matrix

struct Sizes {
  int64_t capacity, columns, M;
};

void clear(const Sizes& sizes) {
  SCOPED_TRACE(sizes.M);
  const auto elements = static_cast<size_t>(sizes.capacity * sizes.columns);
  std::vector<uint16_t> values(elements + kGuard, kNan);
  const size_t bytes = values.size() * sizeof(uint16_t);
  const std::vector<int32_t> offsets = {0, 0, static_cast<int32_t>(sizes.M)};
  void *matrix = nullptr, *ends = nullptr;
  ASSERT_EQ(cudaMalloc(&matrix, bytes), cudaSuccess);
  ASSERT_EQ(cudaMalloc(&ends, offsets.size() * sizeof(int32_t)), cudaSuccess);
  cudaMemcpy(matrix, values.data(), bytes, cudaMemcpyHostToDevice);
  cudaMemcpy(ends, offsets.data(), offsets.size() * sizeof(int32_t), cudaMemcpyHostToDevice);
  const Rows rows{.E = 2, .capacity = sizes.capacity, .offsets = static_cast<int32_t*>(ends)};
  cuda::clear_rest(rows,
                   {.data = matrix,
                    .dtype = TILEMOE_BFLOAT16,
                    .ndim = 2,
                    .shape = {sizes.capacity, sizes.columns},
                    .stride = {sizes.columns, 1}},
                   nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (const simulator::Finding& finding : simulator::Machine::instance().take_findings())
    ADD_FAILURE() << describe(finding);
  cudaMemcpy(values.data(), matrix, bytes, cudaMemcpyDeviceToHost);
  for (size_t i = 0; i < values.size(); ++i) {
    const bool rest = i >= static_cast<size_t>(sizes.M * sizes.columns) && i < elements;
    ASSERT_EQ(values[i], rest ? 0 : kNan) << "element " << i;
  }
  cudaFree(matrix), cudaFree(ends);
}

TEST(ClearRest, WritesTheRowsWithoutATokenAlone) {
  simulator::Machine::instance().set_device(simulator::setting_of("sm90").device);
  for (int64_t M : {0, 1, 36, 37}) clear({37, 24, M});
  clear({2100, 520, 3});  // more vectors than threads
}

}  // namespace
}  // namespace tilemoe::test
