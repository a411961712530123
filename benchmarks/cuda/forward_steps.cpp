// Times of the forward steps on the device, for every tile that a step has and for other layouts:
// cold L2, medians. With --configurations, whether the cost model picks the fastest tile; status 1
// where it does not.
// tilemoe_cuda_steps [config ...]
// tilemoe_cuda_steps --configurations [--json FILE] [config ...]
#include <optional>
#include <utility>

#include "configurations.h"
#include "cuda/products.h"
#include "forward_problem.h"

namespace tilemoe {
namespace {

void bench(const Config& c) {
  ForwardProblem problem(c);
  const DeviceBuffer flush(size_t{256} << 20);
  DeviceBuffer rows(static_cast<size_t>(c.T * c.K * c.d) * 2);
  rows.fill(0.2);
  Backend& backend = cuda::backend();
  const auto m = static_cast<double>(c.T * c.K), d = static_cast<double>(c.d);
  const auto E = static_cast<double>(c.E), T = static_cast<double>(c.T);
  const auto n = static_cast<double>(c.n);
  const auto report_up = [&](const char* name, const UpProjection& step, double X_rows) {
    const double ms = median_ms(flush, [&] { backend.up_projection(step); });
    report(c.name, "up", name, ms, 4 * m * d * n,
           2 * (X_rows * d + E * 2 * n * d + 2 * m * n + m * n));
  };
  of_every_tile(problem.up,
                [&](const char* name, const UpProjection& step) { report_up(name, step, T); });
  of_every_tile(problem.down, [&](const char* name, const DownProjection& step) {
    const double down_ms = median_ms(flush, [&] { backend.down_projection(step); });
    report(c.name, "down", name, down_ms, 2 * m * d * n, 2 * (m * n + E * n * d + m * d));
  });
  report_up("grouped", problem.grouped_up(rows), m);
  report_up("transposed", problem.transposed_up(TILEMOE_GATE_CONCATENATED), T);
  report_up("adjacent", problem.transposed_up(TILEMOE_GATE_INTERLEAVED), T);
  const double combine_ms = median_ms(flush, [&] { backend.combine(problem.combine); });
  report(c.name, "combine", "", combine_ms, 2 * m * d, 2 * (m * d + T * d));
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty() || names.front() != "--configurations")
    return tilemoe::bench_configs(argc, argv, tilemoe::bench);
  names.erase(names.begin());
  std::string json_file;
  if (names.size() >= 2 && names.front() == "--json") {
    json_file = names[1];
    names.erase(names.begin(), names.begin() + 2);
  }
  try {
    return tilemoe::compare_configurations(names, json_file) ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  }
}
