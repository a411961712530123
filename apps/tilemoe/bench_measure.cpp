#include "bench_measure.h"

#include <stdexcept>

#include "table.h"

namespace tilemoe::app {
namespace {

template <class Body>
double time_ms(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return milliseconds_since(start);
}

// The case, where the layer and the baseline fit the memory together.
const verify::Case& fitting(const verify::Case& layer, bool with_dense) {
  const size_t layer_bytes = BenchLayer::measure(layer, Device::kCpu).peak;
  const size_t needed = layer_bytes + (with_dense ? DenseBaseline::bytes(layer) : 0);
  const size_t available = cpu_machine().available_memory();
  const size_t reserve = available / 16;  // for everything that is small
  if (needed > available - reserve)
    throw std::runtime_error(layer.name + " in " + tilemoe_dtype_name(to_c(layer.dtype)) +
                             " needs " + bytes(static_cast<double>(needed)) + " of memory" +
                             (with_dense ? " with its baseline" : "") + ", but " +
                             bytes(static_cast<double>(available - reserve)) + " can be had");
  return layer;
}

}  // namespace

Measurement::Measurement(const verify::Case& layer, bool with_dense)
    : case_(fitting(layer, with_dense)), layer_(layer, cpu_machine(), true) {
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

  HostClock clock;
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
