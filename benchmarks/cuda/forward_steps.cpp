// Times of the forward steps on the device, for every tile that a step has: cold L2, medians.
// tilemoe_cuda_steps [config ...]
#include <optional>
#include <utility>

#include "cuda/schedule/configuration.h"
#include "step_bench.h"

namespace tilemoe {
namespace {

void bench(const Config& c) {
  const int64_t M = c.T * c.K;
  const auto elements = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b * 2); };
  DeviceBuffer X(elements(c.T, c.d)), W1(elements(c.E * 2 * c.n, c.d)),
      W2(elements(c.E * c.d, c.n));
  DeviceBuffer H(elements(M, 2 * c.n)), A(elements(M, c.n)), Y(elements(M, c.d)),
      O(elements(c.T, c.d));
  DeviceBuffer flush(size_t{256} << 20);
  X.fill(0.2), W1.fill(0.02), W2.fill(0.02);
  const RandomRouting routing(c);
  DeviceBuffer offsets(routing.offsets.size() * 4), tokens(routing.tokens.size() * 4);
  DeviceBuffer pair_row(routing.pair_row.size() * 4), scores(routing.scores.size() * 4);
  offsets.upload(routing.offsets), tokens.upload(routing.tokens);
  pair_row.upload(routing.pair_row), scores.upload(routing.scores);

  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = TILEMOE_CUDA;
  experts.dtype = TILEMOE_BFLOAT16;
  experts.d = c.d, experts.n = c.n, experts.E = c.E;
  tilemoe_routing object{};
  object.spec.kind = TILEMOE_ROUTING_TOP_K;
  object.spec.T = c.T, object.spec.E = c.E, object.spec.K = c.K;
  object.spec.pairs = object.spec.capacity = M;
  object.offsets = static_cast<int32_t*>(offsets.data());
  object.pair_row = static_cast<int32_t*>(pair_row.data());
  object.row_score = static_cast<float*>(scores.data());
  const Rows rows{.E = c.E,
                  .capacity = M,
                  .offsets = object.offsets,
                  .token = static_cast<const int32_t*>(tokens.data()),
                  .score = nullptr};
  UpProjection up{};
  up.experts = &experts;
  up.rows = rows;
  up.X = tensor(X, {c.T, c.d});
  up.weights.W1 = tensor(W1, {c.E, 2 * c.n, c.d});
  up.H = tensor(H, {M, 2 * c.n});
  up.A = tensor(A, {M, c.n});
  DownProjection down{};
  down.experts = &experts;
  down.rows = rows;
  down.A = up.A;
  down.W2 = tensor(W2, {c.E, c.d, c.n});
  down.Y = tensor(Y, {M, c.d});
  Combine combine{};
  combine.experts = &experts;
  combine.routing = &object;
  combine.row_values = down.Y;
  combine.scale_by_score = true;
  combine.out = tensor(O, {c.T, c.d});
  Backend& backend = cuda::backend();
  const auto m = static_cast<double>(M), d = static_cast<double>(c.d), n = static_cast<double>(c.n);
  const auto E = static_cast<double>(c.E), T = static_cast<double>(c.T);
  const std::pair<const char*, std::optional<cuda::TileConfiguration>> tiles[] = {
      {"chosen", {}},
      {"cooperative256", cuda::kCooperative256},
      {"pairs256", cuda::kCooperative256Pairs},
      {"pingpong128", cuda::kPingPong128}};
  for (const auto& [name, tile] : tiles) {
    if (tile == cuda::kPingPong128) continue;  // not built for this step
    cuda::force_tile(tile);
    const double up_ms = median_ms(flush, [&] { backend.up_projection(up); });
    report(c.name, "up", name, up_ms, 4 * m * d * n,
           2 * (T * d + E * 2 * n * d + 2 * m * n + m * n));
  }
  for (const auto& [name, tile] : tiles) {
    cuda::force_tile(tile);
    const double down_ms = median_ms(flush, [&] { backend.down_projection(down); });
    report(c.name, "down", name, down_ms, 2 * m * d * n, 2 * (m * n + E * n * d + m * d));
  }
  cuda::force_tile({});
  const double combine_ms = median_ms(flush, [&] { backend.combine(combine); });
  report(c.name, "combine", "", combine_ms, 2 * m * d, 2 * (m * d + T * d));
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  return tilemoe::bench_configs(argc, argv, tilemoe::bench);
}
