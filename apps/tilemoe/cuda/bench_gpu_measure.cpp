#include "cuda/bench_gpu_measure.h"

#include <algorithm>
#include <utility>

#include "cuda/random_fill.h"

namespace tilemoe::app {
namespace {

using std::chrono::steady_clock;

void wait() {
  check_cuda(cudaDeviceSynchronize(), "the work on the GPU");
}

// 0 after the process's first.
double create_context_ms() {
  static bool created = false;
  if (std::exchange(created, true)) return 0;
  const auto start = steady_clock::now();
  check_cuda(cudaFree(nullptr), "the GPU's context");
  return milliseconds_since(start);
}

}  // namespace

GpuMeasurement::Dense::Dense(const verify::Case& layer, int64_t rows, const DeviceCacheFlush& flush)
    : rows_in(layer.dtype, rows * std::max(layer.d, layer.n)),
      rows_out(layer.dtype, rows * std::max(layer.h_width(), layer.d)),
      up_weight(layer.dtype, layer.h_width() * layer.d),
      down_weight(layer.dtype, layer.d * layer.n),
      up({rows, layer.h_width(), layer.d, layer.dtype, layer.dtype}),
      down({rows, layer.d, layer.n, layer.dtype, layer.dtype}) {
  fill_normal(rows_in, layer.dtype, 0.2, 7);
  fill_normal(up_weight, layer.dtype, 0.02, 8);
  fill_normal(down_weight, layer.dtype, 0.02, 9);
  up.choose(rows_in.data(), up_weight.data(), rows_out.data(), flush);
  down.choose(rows_in.data(), down_weight.data(), rows_out.data(), flush);
}

FirstCall GpuMeasurement::measure_first_call(GpuLayer& layer, double context_ms) {
  layer.router();
  wait();
  const auto start = steady_clock::now();
  layer.library();
  wait();
  return {.context = context_ms, .forward = milliseconds_since(start)};
}

GpuMeasurement::GpuMeasurement(const verify::Case& layer, bool with_dense)
    : context_ms_(create_context_ms()),
      case_(layer),
      layer_(layer),
      first_(measure_first_call(layer_, context_ms_)),
      rows_(layer_.rows()) {
  if (with_dense && rows_ > 0) dense_ = std::make_unique<Dense>(layer, rows_, flush_);
  for (int i = 0; i < 3; ++i) layer_.forward();
  wait();
}

const GpuRound& GpuMeasurement::run_round() {
  GpuRound round;
  flush_();
  round.forward = device_ms([&] { layer_.forward(); });

  wait();
  const auto start = steady_clock::now();
  layer_.forward();
  round.host = milliseconds_since(start);
  wait();

  DeviceClock clock(flush_);
  layer_.forward(&clock);
  clock.collect();
  round.steps = clock.entries();

  if (dense_) {
    Dense& dense = *dense_;
    flush_();
    round.dense_up = device_ms(
        [&] { dense.up.run(dense.rows_in.data(), dense.up_weight.data(), dense.rows_out.data()); });
    flush_();
    round.dense_down = device_ms([&] {
      dense.down.run(dense.rows_in.data(), dense.down_weight.data(), dense.rows_out.data());
    });
  }
  rounds_.push_back(std::move(round));
  return rounds_.back();
}

}  // namespace tilemoe::app
