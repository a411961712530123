// Tensor maps that the host keeps: memory that is used again with another size, stride or box has
// another map, in every thread. (The simulator's maps do not differ by bfloat16 and float16.)
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <thread>
#include <vector>

#include "cuda/core/tensor_map.h"
#include "simulator/tensor_map.h"

namespace tilemoe::cuda {
namespace {

// Never read: a map has the address alone.
char* memory() {
  alignas(128) static char bytes[1 << 16];
  return bytes;
}

TensorMapSpec spec_of(int64_t columns = 128, int64_t rows = 64, int64_t stride = 256) {
  return {.dtype = TILEMOE_BFLOAT16,
          .data = memory(),
          .size = {columns, rows, 4},
          .stride = {stride, 2 * rows * stride},
          .box = {64, 32, 1}};
}

void expect_map_of(const TensorMapSpec& spec) {
  const CUtensorMap map = make_tensor_map(spec);
  const simulator::TensorMap read = simulator::decode_tensor_map(&map);
  EXPECT_EQ(read.rank, 3);
  EXPECT_EQ(read.address, reinterpret_cast<uintptr_t>(spec.data));
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(read.size[i], static_cast<uint64_t>(spec.size[i]));
    EXPECT_EQ(read.box[i], static_cast<uint32_t>(spec.box[i]));
  }
  for (size_t i = 0; i < 2; ++i)
    EXPECT_EQ(read.stride_bytes[i], 2 * static_cast<uint64_t>(spec.stride[i]));
}

// One map for each change of one argument.
std::vector<TensorMapSpec> variants() {
  std::vector<TensorMapSpec> all = {spec_of(), spec_of(120), spec_of(128, 72),
                                    spec_of(128, 64, 264)};
  all.push_back(spec_of()), all.back().stride[1] += 8;
  all.push_back(spec_of()), all.back().size[2] = 5;
  all.push_back(spec_of()), all.back().box[1] = 16;
  all.push_back(spec_of()), all.back().data = memory() + 128;
  return all;
}

TEST(KeptTensorMaps, OfMemoryThatIsUsedAgain) {
  for (int round = 0; round < 3; ++round)
    for (const TensorMapSpec& spec : variants()) expect_map_of(spec);
}

// A map of four dimensions and one of five, of the same memory.
TEST(KeptTensorMaps, RaggedMapsAndThoseWithParts) {
  const RaggedMapSpec spec{.dtype = TILEMOE_BFLOAT16,
                           .data = memory(),
                           .columns = 64,
                           .rows = 100,
                           .row_stride = 128,
                           .box = {64, 16}};
  for (int round = 0; round < 2; ++round) {
    const CUtensorMap plain = make_ragged_map(spec);
    const CUtensorMap parts = make_ragged_parts_map(spec, {.count = 2, .stride = 64});
    const CUtensorMap others = make_ragged_parts_map(spec, {.count = 2, .stride = 32});
    EXPECT_EQ(simulator::decode_tensor_map(&plain).rank, 4);
    EXPECT_EQ(simulator::decode_tensor_map(&parts).rank, 5);
    EXPECT_EQ(simulator::decode_tensor_map(&parts).stride_bytes[3], 128U);
    EXPECT_EQ(simulator::decode_tensor_map(&others).stride_bytes[3], 64U);
  }
}

// More maps than a thread keeps, in several threads.
TEST(KeptTensorMaps, ManyInSeveralThreads) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t)
    threads.emplace_back([t] {
      for (int round = 0; round < 2; ++round)
        for (int64_t i = 0; i < 1500; ++i)
          expect_map_of(spec_of(8 * (1 + i % 200), 8 * (1 + t + i)));
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tilemoe::cuda
