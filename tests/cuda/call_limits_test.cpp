// Limits of the CUDA kernels, all of which are checked before a call writes anything. No kernel runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "core/check.h"
#include "cuda/cuda_backend.h"
#include "cuda/gemm/schedule/splits.h"
#include "tilemoe/error.h"

namespace tilemoe::cuda {
namespace {

constexpr int64_t kFourGiB = int64_t{1} << 32;

tilemoe_tensor matrices(int64_t E, int64_t rows, int64_t columns, tilemoe_dtype dtype) {
  tilemoe_tensor tensor{};
  tensor.data = &tensor, tensor.dtype = dtype, tensor.ndim = 3;
  tensor.shape[0] = E, tensor.shape[1] = rows, tensor.shape[2] = columns;
  tensor.stride[0] = rows * columns, tensor.stride[1] = columns, tensor.stride[2] = 1;
  return tensor;
}

tilemoe_tensor rows(int64_t count, int64_t width) {
  tilemoe_tensor tensor{};
  tensor.data = &tensor, tensor.dtype = TILEMOE_BFLOAT16, tensor.ndim = 2;
  tensor.shape[0] = count, tensor.shape[1] = width;
  tensor.stride[0] = width, tensor.stride[1] = 1;
  return tensor;
}

struct Call {
  tilemoe_experts experts{};
  tilemoe_routing_spec routing{};
  tilemoe_weights weights{}, gradients{};
  tilemoe_tensor X{}, dO{};

  explicit Call(int64_t capacity = 4096, int64_t E = 8, int64_t d = 64, int64_t n = 32) {
    experts.dtype = TILEMOE_BFLOAT16, experts.E = E, experts.d = d, experts.n = n;
    routing.T = std::min<int64_t>(capacity, 1024), routing.E = E, routing.capacity = capacity;
    weights.W1 = matrices(E, 2 * n, d, TILEMOE_BFLOAT16);
    weights.W2 = matrices(E, d, n, TILEMOE_BFLOAT16);
    gradients.W1 = matrices(E, 2 * n, d, TILEMOE_FLOAT32);
    gradients.W2 = matrices(E, d, n, TILEMOE_FLOAT32);
    X = rows(routing.T, d), dO = rows(routing.T, d);
  }

  tilemoe_tensor& named(const std::string& name) {
    if (name == "X") return X;
    if (name == "dO") return dO;
    tilemoe_weights& all = name[0] == 'd' ? gradients : weights;
    return name.ends_with("W1") ? all.W1 : all.W2;
  }

  // Empty if nothing is refused.
  std::string refusal() const {
    try {
      check_call_limits({experts, routing, weights, X, dO, gradients});
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), Status::kUnsupported);
      return error.what();
    }
    return "";
  }
};

TEST(CallLimits, TakesAnOrdinaryLayer) {
  EXPECT_EQ(Call().refusal(), "");
}

TEST(CallLimits, NamesEveryTensorWhoseStrideIsTooLarge) {
  struct Row {
    const char* name;
    int dimension;
    int64_t max_bytes;
  };
  constexpr int64_t kExperts = limits::kMaxExpertStrideBytesCuda, kRows = kFourGiB - 1;
  for (const Row& row :
       {Row{"X", 0, kRows}, Row{"dO", 0, kRows}, Row{"weights.W1", 1, kRows},
        Row{"weights.W1", 2, kRows}, Row{"weights.W1", 0, kExperts}, Row{"weights.W2", 1, kRows},
        Row{"weights.W2", 2, kRows}, Row{"weights.W2", 0, kExperts}, Row{"dweights.W1", 1, kRows},
        Row{"dweights.W2", 2, kRows}, Row{"dweights.W2", 0, kExperts}}) {
    SCOPED_TRACE(row.name);
    Call call;
    tilemoe_tensor& tensor = call.named(row.name);
    const auto element = static_cast<int64_t>(tilemoe_dtype_size(tensor.dtype));
    tensor.stride[row.dimension] = row.max_bytes / element;
    EXPECT_EQ(call.refusal(), "");
    tensor.stride[row.dimension] = row.max_bytes / element + 1;
    EXPECT_NE(call.refusal().find(std::string(row.name) + " has"), std::string::npos)
        << call.refusal();
    tensor.shape[row.dimension] = 1;  // nothing steps along it
    EXPECT_EQ(call.refusal(), "");
  }
}

// A call that passes the check has no more tiles than the kernels can count, for every tile.
TEST(CallLimits, WhatPassesHasNoMoreTilesThanAreCounted) {
  std::mt19937_64 random(5);
  const auto up_to = [&](int bits) {
    const int used = static_cast<int>(random() % static_cast<uint64_t>(bits)) + 1;
    return static_cast<int64_t>(random() >> (64 - used)) + 1;
  };
  int passed = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    const int64_t capacity = std::min(up_to(30), limits::kMaxRowsCuda), E = up_to(26);
    const int64_t d = 8 * up_to(16), n = 8 * up_to(16);
    Call call(capacity, E, d, n);
    if (!call.refusal().empty()) {
      ++refused;
      // At least 256 GiB in 16 bits: of rows, or of weights.
      EXPECT_GT(
          std::max(static_cast<double>(std::max(d, 2 * n)) * static_cast<double>(capacity),
                   static_cast<double>(E) * 2 * static_cast<double>(n) * static_cast<double>(d)),
          static_cast<double>(int64_t{1} << 37));
      continue;
    }
    ++passed;
    for (const int64_t tile_rows : {16, 64, 128, 256})
      for (const int64_t tile_columns : {64, 128, 192, 256})
        for (const int64_t width : {d, n, 2 * n}) {
          const int64_t m_blocks = capacity / tile_rows + std::min(E, capacity);
          const int64_t n_blocks = (width + tile_columns - 1) / tile_columns;
          ASSERT_LE(m_blocks, INT32_MAX / (2 * n_blocks));
        }
    for (const auto& tiles : {ReferenceTiles::of(d, n, 1), ReferenceTiles::of(d, n, 2),
                              ReferenceTiles::of(d, 2 * n, 1)})
      ASSERT_LE(tiles.m_blocks, INT32_MAX / (2 * int64_t{tiles.n_blocks} * E));
  }
  EXPECT_GT(passed, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace tilemoe::cuda
