// The tile that each projection uses, against the times of all its tiles measured on an H100 and on
// an H200: data/tile_times.jsonl, one projection of a device per line.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cuda/gemm/schedule/sizes.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {
namespace {

using nlohmann::json;

constexpr DeviceModel kH100 = hopper_model(132, 3.35e12), kH200 = hopper_model(132, 4.92e12);
constexpr double kBar = 1.03;

// The tiles of bfloat16 and plain SwiGLU.
constexpr Variant kSwiGLU{.activations = Activations::kSwiGLU};
constexpr Variant kSwiGLUBackward{.weights = Major::kMN, .activations = Activations::kSwiGLU};

std::span<const TileConfiguration> tiles_of(GemmName gemm, const Variant& variant) {
  const auto tiles = cuda::tiles_of({gemm, ArchName::kSm90, variant});
  EXPECT_FALSE(tiles.empty());
  return tiles;
}

std::string name_of(const TileConfiguration& tile) {
  return std::to_string(tile.block_m) + "x" + std::to_string(tile.block_n) +
         (tile.schedule == Schedule::kPingPong ? " ping-pong" : " cooperative") +
         (tile.cluster > 1 ? ", pairs" : "");
}

// {name, ..., values: {sizes, step, "<tile>_ms": milliseconds}}
std::vector<json> measured() {
  std::ifstream file(TILEMOE_TEST_DATA "/tile_times.jsonl");
  std::vector<json> entries;
  for (std::string line; std::getline(file, line);) entries.push_back(json::parse(line));
  return entries;
}

// The median of a quantity: a number, or its quartiles.
double median_of(const json& value) {
  return value.is_array() ? value.at(1).get<double>() : value.get<double>();
}

TileConfiguration pick_of(const json& entry, const DeviceModel& model = kH100) {
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
    return choose_tile(size_of(up), tiles_of(GemmName::kUpProjection, kSwiGLU), model);
  }
  if (step == "down") {
    DownProjection down{};
    down.experts = &experts, down.rows = rows, down.Y.shape[1] = experts.d;
    return choose_tile(size_of(down), tiles_of(GemmName::kDownProjection, {}), model);
  }
  EXPECT_EQ(step, "dA'");
  ActivationGradient gradient{};
  gradient.experts = &experts, gradient.rows = rows;
  return choose_tile(size_of(gradient), tiles_of(GemmName::kActivationGradient, kSwiGLUBackward),
                     model);
}

TEST(TileChoice, IsNearlyTheBestTileMeasured) {
  const std::vector<json> entries = measured();
  EXPECT_GE(entries.size(), 100u);
  for (const json& entry : entries) {
    const bool h200 = entry.at("device").get<std::string>().ends_with("H200");
    const json& values = entry.at("values");
    double best = 1e9;
    int tiles = 0;
    for (const auto& [name, value] : values.items())
      if (name.ends_with("_ms")) best = std::min(best, median_of(value)), ++tiles;
    EXPECT_GE(tiles, 3) << entry.at("name");
    const std::string pick = name_of(pick_of(values, h200 ? kH200 : kH100)) + "_ms";
    ASSERT_TRUE(values.contains(pick)) << entry.at("name") << ": " << pick;
    EXPECT_LE(median_of(values.at(pick)), kBar * best) << entry.at("name") << ": " << pick;
  }
}

// With one whole block of rows on average, half of the experts have two blocks.
TEST(TileChoice, CountsTheSecondBlockOfExpertsAboveTheMean) {
  json entry = {{"T", 2048}, {"d", 2048}, {"n", 768}, {"E", 128}, {"K", 8}, {"step", "up"}};
  EXPECT_EQ(pick_of(entry), kCluster256);
  entry["T"] = 1024;  // 64 rows an expert: nobody has two
  EXPECT_EQ(pick_of(entry), kCooperative256);
}

// Where blocks of 192 columns waste as much as those of 256, and where rows are gathered.
TEST(TileChoice, TakesWidePingPongByItsRateAlone) {
  for (const char* step : {"up", "down"}) {
    const json entry = {{"T", 32768}, {"d", 4096}, {"n", 1536},
                        {"E", 128},   {"K", 8},    {"step", step}};
    DeviceModel model = kH100;
    EXPECT_NE(pick_of(entry), kPingPongCluster192) << step;
    model.ping_pong_192 = 1.2;
    EXPECT_NE(pick_of(entry, model), kPingPongCluster192) << step;
    model.ping_pong_192 = 0.9;
    EXPECT_EQ(pick_of(entry, model), kPingPongCluster192) << step;
  }
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
