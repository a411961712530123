// The projections of forward with every tile that their kernels have, on a simulated H100: exact on
// whole numbers, and the same bits from all tiles.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/plan.h"
#include "lora_problem.h"
#include "simulator/machine/machine.h"
#include "verify/activation.h"

namespace tilemoe::test {
namespace {

using cuda::TileConfiguration;

constexpr tilemoe_dtype kDType = TILEMOE_BFLOAT16;
// Columns end inside a slice of every tile, and a sum inside a k block.
constexpr int64_t kE = 4, kD = 200, kN = 296, kT = 90;
constexpr int kSeeds = 3;
// Blocks of rows with and without a partner in a cluster, and several tiles for a CTA.
const std::vector<int32_t> kCounts = {300, 0, 3, 130};
constexpr int64_t kM = 433;

std::string name_of(const TileConfiguration& tile) {
  return std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
         (tile.schedule == cuda::Schedule::kPingPong ? " ping-pong" : " cooperative") +
         (tile.cluster > 1 ? ", pairs" : "");
}

// Any of -2, -1, 0, 1, 2.
double small(const Index& index, int64_t salt) {
  auto mixed = static_cast<uint64_t>(((salt * 31 + index[0]) * 1009 + index[1]) * 1013 + index[2]);
  mixed *= 0x9e3779b97f4a7c15;
  return static_cast<double>((mixed >> 33) % 5) - 2;
}

PlacedTensor matrix(int64_t rows, int64_t columns) {
  return PlacedTensor(kDType, {rows, columns}, {columns, 1});
}
PlacedTensor weights(int64_t rows, int64_t columns, bool transposed) {
  return PlacedTensor(kDType, {kE, rows, columns},
                      {rows * columns, transposed ? 1 : columns, transposed ? rows : 1});
}

enum class Kind {
  kPlain,
  kClamped,  // the SwiGLU of gpt-oss
  kColumns,  // the same, and the weights of transformers: transposed, columns interleaved
};

// A layer's tensors, and the rows of its experts.
class Layer {
 public:
  explicit Layer(Kind kind)
      : X(matrix(kT, kD)),
        A_in(matrix(kM, kN)),
        W1(weights(2 * kN, kD, kind == Kind::kColumns)),
        W2(weights(kD, kN, kind == Kind::kColumns)) {
    for (const int32_t count : kCounts) begins_.push_back(begins_.back() + count);
    for (int64_t row = 0; row < kM; ++row) token_.push_back(static_cast<int32_t>(row * 37 % kT));
    offsets_ = upload(begins_), tokens_ = upload(token_);
    X.fill([](const Index& i) { return small(i, 1); });
    A_in.fill([](const Index& i) { return small(i, 2); });
    W1.fill([](const Index& i) { return small(i, 3) / 8; });  // some gates are clamped
    W2.fill([](const Index& i) { return small(i, 4); });
    experts.struct_size = sizeof experts;
    experts.dtype = kDType, experts.E = kE, experts.d = kD, experts.n = kN;
    experts.activation = TILEMOE_SWIGLU;
    experts.gate_layout =
        kind == Kind::kColumns ? TILEMOE_GATE_INTERLEAVED : TILEMOE_GATE_CONCATENATED;
    if (kind != Kind::kPlain) experts.clamp = 7, experts.alpha = 1.702f, experts.up_shift = 1;
    rows.E = kE, rows.capacity = kM, rows.of_an_expert = kM;
    rows.offsets = offsets_, rows.token = tokens_;
  }
  ~Layer() { cudaFree(offsets_), cudaFree(tokens_); }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;

  int64_t expert_of(int64_t row) const {
    int64_t expert = 0;
    while (row >= begins_[static_cast<size_t>(expert) + 1]) ++expert;
    return expert;
  }
  std::vector<double> H() const {
    return each(2 * kN, kD, [&](const Index& i) {
      return X.at(token_[static_cast<size_t>(i[0])], i[2]) * W1.at({expert_of(i[0]), i[1], i[2]});
    });
  }
  // Of gate and up in a row of H, whose sums are given.
  double A(const std::vector<double>& sums, int64_t row, int64_t column) const {
    const bool interleaved = experts.gate_layout == TILEMOE_GATE_INTERLEAVED;
    const double* const H = &sums[static_cast<size_t>(row * 2 * kN)];
    verify::Case layer;
    layer.clamp = experts.clamp, layer.alpha = experts.alpha, layer.up_shift = experts.up_shift;
    return verify::swiglu(layer, H[interleaved ? 2 * column : column],
                          H[interleaved ? 2 * column + 1 : kN + column])
        .A;
  }
  std::vector<double> Y() const {
    return each(kD, kN, [&](const Index& i) {
      return A_in.at(i[0], i[2]) * W2.at({expert_of(i[0]), i[1], i[2]});
    });
  }

  PlacedTensor X, A_in, W1, W2;
  tilemoe_experts experts{};
  Rows rows;

 private:
  // (M, columns), each the sum of `length` terms of (row, column, step).
  template <class Term>
  static std::vector<double> each(int64_t columns, int64_t length, const Term& term) {
    std::vector<double> sums(static_cast<size_t>(kM * columns));
    for (int64_t i = 0; i < kM * columns; ++i)
      for (int64_t k = 0; k < length; ++k)
        sums[static_cast<size_t>(i)] += term({i / columns, i % columns, k});
    return sums;
  }
  static int32_t* upload(const std::vector<int32_t>& values) {
    int32_t* data = nullptr;
    const size_t bytes = values.size() * sizeof(int32_t);
    EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), bytes), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return data;
  }

  std::vector<int32_t> begins_{0}, token_;
  int32_t *offsets_ = nullptr, *tokens_ = nullptr;
};

std::vector<uint16_t> bits_of(const PlacedTensor& tensor, int64_t elements) {
  std::vector<uint16_t> bits(static_cast<size_t>(elements));
  EXPECT_EQ(cudaMemcpy(bits.data(), tensor.tensor().data, bits.size() * 2, cudaMemcpyDeviceToHost),
            cudaSuccess);
  return bits;
}

double at(const std::vector<double>& matrix, int64_t columns, const Index& i) {
  return matrix[static_cast<size_t>(i[0] * columns + i[1])];
}

// Calls run() for each of the step's tiles and seeds.
template <class Step, class Run>
void for_each_tile(Step& step, const Run& run) {
  bool has_wide_ping_pong = false;
  for (const TileConfiguration& tile : cuda::tiles_of(cuda::key_of(step)))
    for (uint64_t seed = 0; seed < kSeeds; ++seed) {
      SCOPED_TRACE(name_of(tile) + ", seed " + std::to_string(seed));
      simulator::Machine::instance().set_seed(seed);
      step.tuning.tile = &tile;
      ASSERT_EQ(*cuda::kernel_of(step), tile);
      run();
      has_wide_ping_pong = has_wide_ping_pong || tile == cuda::kPingPongCluster192;
    }
  EXPECT_TRUE(has_wide_ping_pong);
}

class Tiles : public testing::TestWithParam<Kind> {};

TEST_P(Tiles, OfTheUpProjectionGiveEqualBits) {
  simulate("sm90");
  Layer layer(GetParam());
  UpProjection up{};
  up.experts = &layer.experts, up.rows = layer.rows, up.X = layer.X.tensor();
  up.weights.W1 = layer.W1.tensor();
  const std::vector<double> sums = layer.H();
  std::vector<uint16_t> expected;
  for_each_tile(up, [&] {
    PlacedTensor H = matrix(kM, 2 * kN), A = matrix(kM, kN), alone = matrix(kM, kN);
    up.H = H.tensor(), up.A = A.tensor();
    cuda::backend().steps.up_projection.run(up);
    expect_clean_run();
    H.expect("H", [&](const Index& i) { return at(sums, 2 * kN, i); });
    up.H = {}, up.A = alone.tensor();  // inference
    cuda::backend().steps.up_projection.run(up);
    expect_clean_run();
    const std::vector<uint16_t> bits = bits_of(A, kM * kN);
    if (expected.empty()) {
      expected = bits;
      for (int64_t i = 0; i < kM * kN; ++i) {
        const double right = layer.A(sums, i / kN, i % kN);
        ASSERT_NEAR(verify::load(DType::kBFloat16, bits.data(), i), right,
                    0x1p-7 * std::fabs(right) + 1e-6)
            << "A at " << i / kN << ", " << i % kN;
      }
    }
    EXPECT_EQ(bits, expected);
    EXPECT_EQ(bits_of(alone, kM * kN), expected);
  });
}

TEST_P(Tiles, OfTheDownProjectionAreExact) {
  simulate("sm90");
  Layer layer(GetParam());
  DownProjection down{};
  down.experts = &layer.experts, down.rows = layer.rows, down.A = layer.A_in.tensor();
  down.W2 = layer.W2.tensor();
  const std::vector<double> sums = layer.Y();
  for_each_tile(down, [&] {
    PlacedTensor Y = matrix(kM, kD);
    down.Y = Y.tensor();
    cuda::backend().steps.down_projection.run(down);
    expect_clean_run();
    Y.expect("Y", [&](const Index& i) { return at(sums, kD, i); });
  });
}

const auto kName = [](const auto& test) {
  switch (test.param) {
    case Kind::kPlain: return "plain";
    case Kind::kClamped: return "clamped";
    default: return "columns";
  }
};

INSTANTIATE_TEST_SUITE_P(, Tiles, testing::Values(Kind::kPlain, Kind::kClamped, Kind::kColumns),
                         kName);

}  // namespace
}  // namespace tilemoe::test
