#include "bench_measure.h"

namespace tilemoe::app {
namespace {

template <class Body>
double time_ms(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return milliseconds_since(start);
}

}  // namespace

Measurement::Measurement(const verify::Case& layer, Device device, bool with_dense)
    : case_(layer), layer_(layer, device) {
  if (with_dense && DenseBaseline::available(layer.dtype))
    dense_ = std::make_unique<DenseBaseline>(layer);
  layer_.forward();
  layer_.backward();
}

const Round& Measurement::run_round() {
  Round round;
  flush_();
  round.layer.forward = time_ms([&] { layer_.forward(); });
  flush_();
  round.layer.backward = time_ms([&] { layer_.backward(); });

  StepClock clock;
  flush_();
  layer_.forward(&clock);
  flush_();
  layer_.backward(&clock);
  round.steps = clock.entries();

  if (dense_) {
    flush_();
    round.dense.forward = time_ms([&] { dense_->forward(); });
    let_threads_rest();
    flush_();
    round.dense.backward = time_ms([&] { dense_->backward(); });
    let_threads_rest();
  }
  rounds_.push_back(std::move(round));
  return rounds_.back();
}

}  // namespace tilemoe::app
