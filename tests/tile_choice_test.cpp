// The tile that each projection takes, against the times of all its tiles as an H100 was measured:
// benchmarks/results/gpu_configurations.json, by `tilemoe_cuda_steps --configurations`.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "cuda/instances/table.h"
#include "cuda/schedule/projection_sizes.h"

namespace tilemoe::cuda {
namespace {

using nlohmann::json;

constexpr DeviceModel kH100 = hopper_model(132);
constexpr double kBar = 1.03;

// What bfloat16 and plain SwiGLU have.
constexpr Variant kSwiGLU{.activations = Activations::kSwiGLU};
constexpr Variant kSwiGLUBackward{.weights = Major::kMN, .activations = Activations::kSwiGLU};

Tiles tiles_of(ProductName product, const Variant& variant) {
  const Tiles tiles({product, KitName::kSm90, variant});
  EXPECT_FALSE(tiles.empty());
  return tiles;
}

std::string name_of(const TileConfiguration& tile) {
  return std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
         (tile.schedule == Schedule::kPingPong ? " ping-pong" : " cooperative") +
         (tile.cluster > 1 ? ", pairs" : "");
}

json measured() {
  std::ifstream file(TILEMOE_RESULTS "/gpu_configurations.json");
  return json::parse(file).at("items").at(0).at("report").at("projections");
}

TileConfiguration pick_of(const json& entry) {
  static constexpr int32_t kSomeToken = 0;
  const auto number = [&](const char* name) { return entry.at(name).get<int64_t>(); };
  tilemoe_experts experts{};
  experts.d = number("d"), experts.n = number("n"), experts.E = number("E");
  Rows rows;
  rows.E = experts.E, rows.capacity = number("T") * number("K"), rows.token = &kSomeToken;
  const std::string step = entry.at("step");
  if (step == "up") {
    UpProjection up{};
    up.experts = &experts, up.rows = rows;
    return choose_tile(size_of(up), tiles_of(ProductName::kUpProjection, kSwiGLU), kH100);
  }
  if (step == "down") {
    DownProjection down{};
    down.experts = &experts, down.rows = rows, down.Y.shape[1] = experts.d;
    return choose_tile(size_of(down), tiles_of(ProductName::kDownProjection, {}), kH100);
  }
  EXPECT_EQ(step, "dA'");
  ActivationGradient gradient{};
  gradient.experts = &experts, gradient.rows = rows;
  return choose_tile(size_of(gradient), tiles_of(ProductName::kActivationGradient, kSwiGLUBackward),
                     kH100);
}

TEST(TileChoice, IsWithinThreePercentOfTheBestTileMeasured) {
  const json entries = measured();
  EXPECT_GE(entries.size(), 60u);
  for (const json& entry : entries) {
    double best = 1e9;
    for (const auto& [tile, ms] : entry.at("ms").items()) best = std::min(best, ms.get<double>());
    const std::string pick = name_of(pick_of(entry));
    ASSERT_TRUE(entry.at("ms").contains(pick)) << pick;
    EXPECT_LE(entry.at("ms").at(pick).get<double>(), kBar * best)
        << entry.at("config") << ", " << entry.at("step") << ": " << pick;
  }
}

// Of a whole block of rows in the mean, half of the experts have two.
TEST(TileChoice, CountsTheSecondBlockOfExpertsAboveTheMean) {
  json entry = {{"T", 2048}, {"d", 2048}, {"n", 768}, {"E", 128}, {"K", 8}, {"step", "up"}};
  EXPECT_EQ(pick_of(entry), kCluster256);
  entry["T"] = 1024;  // 64 rows an expert: nobody has two
  EXPECT_EQ(pick_of(entry), kCooperative256);
}

TEST(TileChoice, TakesNoRowsAtAll) {
  const json entry = {{"T", 0}, {"d", 64}, {"n", 64}, {"E", 4}, {"K", 2}, {"step", "down"}};
  EXPECT_NO_THROW(pick_of(entry));
}

TEST(ProjectionSize, OfAnActivationWithoutAGateHasNColumns) {
  tilemoe_experts experts{};
  experts.d = 64, experts.n = 48;
  UpProjection up{};
  up.experts = &experts;
  experts.activation = TILEMOE_SWIGLU;
  EXPECT_EQ(size_of(up).columns, 96);
  experts.activation = TILEMOE_RELU;
  EXPECT_EQ(size_of(up).columns, 48);
}

}  // namespace
}  // namespace tilemoe::cuda
