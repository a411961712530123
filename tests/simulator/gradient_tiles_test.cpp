// The weight gradients with every tile that has their width, on a simulated H100: the same bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/plan.h"
#include "lora_problem.h"
#include "simulator/machine/machine.h"

namespace tilemoe::test {
namespace {

constexpr tilemoe_dtype kDType = TILEMOE_BFLOAT16;
constexpr int64_t kT = 37;
constexpr int kSeeds = 3;

struct Case {
  std::string name;
  std::vector<int32_t> counts;
  int64_t d, n;  // of which 192 divides, or nearly, and 256 does not
  int parts;     // 1: dW2; 2: dW1
  bool accumulate = false;
  int32_t workers = 0;
  bool has_splits = false;
};

double fraction(const Index& index, int64_t salt) {
  const int64_t mixed = index[0] * 1009 + index[1] * 211 + index[2] * 31 + salt * 7919;
  return static_cast<double>(mixed % 199 - 99) * 0.0137;
}

int32_t* upload(const std::vector<int32_t>& values) {
  int32_t* data = nullptr;
  const size_t bytes = values.size() * sizeof(int32_t);
  EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), bytes), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
  return data;
}

std::vector<uint16_t> bits_of(const PlacedTensor& tensor, int64_t elements) {
  std::vector<uint16_t> bits(static_cast<size_t>(elements));
  EXPECT_EQ(cudaMemcpy(bits.data(), tensor.tensor().data, bits.size() * 2, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return bits;
}

void expect_equal_bits(const Case& c) {
  SCOPED_TRACE(c.name);
  simulate("sm90");
  const auto E = static_cast<int64_t>(c.counts.size());
  const int64_t M = std::accumulate(c.counts.begin(), c.counts.end(), int64_t{0});
  const int64_t columns = c.parts * c.n;
  std::vector<int32_t> begins{0}, token;
  for (const int32_t count : c.counts) begins.push_back(begins.back() + count);
  for (int64_t row = 0; row < M; ++row) token.push_back(static_cast<int32_t>(row * 11 % kT));
  int32_t *const offsets = upload(begins), *const tokens = upload(token);

  PlacedTensor dense(kDType, {M, columns}, {columns, 1});
  PlacedTensor gathered(kDType, {kT, c.d}, {c.d, 1});
  dense.fill([](const Index& i) { return fraction(i, 1); });
  gathered.fill([](const Index& i) { return fraction(i, 2); });
  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = kDType, experts.E = E, experts.d = c.d, experts.n = c.n;
  cuda::WeightGradient step{};
  step.experts = &experts;
  step.rows.E = E, step.rows.capacity = M, step.rows.of_an_expert = M;
  step.rows.offsets = offsets, step.rows.token = tokens;
  step.dense = dense.tensor(), step.dense_columns = c.n, step.gathered = gathered.tensor();
  step.parts = c.parts, step.accumulate = c.accumulate;
  step.splits = cuda::weight_gradient_splits(
      {.dense_columns = c.n, .parts = c.parts, .d = c.d, .capacity = M, .of_an_expert = M},
      c.workers);
  EXPECT_EQ(step.splits >= 2, c.has_splits);
  step.scratch.bytes = cuda::ExpertRanks::bytes(E, step.splits);
  EXPECT_EQ(cudaMalloc(&step.scratch.data, step.scratch.bytes), cudaSuccess);

  std::vector<uint16_t> expected;
  for (const cuda::TileConfiguration& tile : {cuda::kCluster192, cuda::kWhole192})
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(std::to_string(tile.block_m) + " rows, seed " + std::to_string(seed));
      simulator::Machine::instance().set_seed(seed);
      // dW1: (E, 2 n, d); dW2: (E, d, n), transposed.
      PlacedTensor out(kDType, {E, columns, c.d}, {columns * c.d, c.d, 1});
      PlacedTensor transposed_out(kDType, {E, c.d, c.n}, {c.n * c.d, c.n, 1});
      PlacedTensor& dW = c.parts == 2 ? out : transposed_out;
      if (c.accumulate) dW.fill([](const Index& i) { return fraction(i, 3); });
      if (c.parts == 1) {
        step.part[0] = {.out = transposed(dW.tensor()), .dense_first = 0};
      } else {
        experts.activation = TILEMOE_SWIGLU, experts.gate_layout = TILEMOE_GATE_CONCATENATED;
        const UpParts parts = cuda::up_parts(experts, dW.tensor(), {}, false);
        for (int p = 0; p < 2; ++p) step.part[p] = {.out = parts.part[p], .dense_first = p * c.n};
      }
      step.tuning.tile = &tile;
      const cuda::Kernel kernel = cuda::kernel_of(step);
      ASSERT_EQ(*kernel, tile);
      cuda::start(kernel, step);
      expect_clean_run();
      const std::vector<uint16_t> bits = bits_of(dW, E * columns * c.d);
      if (expected.empty()) expected = bits;
      EXPECT_EQ(bits, expected);
    }
  step.tuning.tile = nullptr;
  EXPECT_EQ(*cuda::kernel_of(step), cuda::kCluster192);
  step.rows.capacity = 1536 * E;  // on average
  EXPECT_EQ(*cuda::kernel_of(step), cuda::kWhole192);
  step.of_factor = true;
  EXPECT_EQ(*cuda::kernel_of(step), cuda::kCluster192);
  cudaFree(offsets), cudaFree(tokens), cudaFree(step.scratch.data);
}

// One to three blocks of 128 rows of D: with and without a last one of which two blocks of columns
// make a reference tile, the second of which may be absent.
TEST(GradientTiles, GiveEqualBits) {
  const std::vector<int32_t> ragged = {129, 0, 1, 70};
  expect_equal_bits({"even", ragged, 200, 136, 1});
  expect_equal_bits({"odd rows, odd columns", ragged, 328, 136, 1});
  expect_equal_bits({"two parts", ragged, 328, 136, 2});
  expect_equal_bits({"added", ragged, 72, 328, 2, true});
}

TEST(GradientTiles, SplitLongExpertsEqually) {
  const std::vector<int32_t> counts = {70, 1301, 0, 2000};
  expect_equal_bits({"odd", counts, 328, 136, 1, false, 3, true});
  expect_equal_bits({"two parts, added", counts, 72, 136, 2, true, 3, true});
}

}  // namespace
}  // namespace tilemoe::test
