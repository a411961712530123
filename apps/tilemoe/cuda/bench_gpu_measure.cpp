#include "cuda/bench_gpu_measure.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "cuda/gpu_machine.h"
#include "table.h"

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

// Before anything is allocated.
const verify::Case& fitting(const verify::Case& layer) {
  if (layer.dtype == DType::kFloat32)
    throw std::runtime_error(layer.name + " on a GPU is in bfloat16 or float16");
  const size_t needed = BenchLayer::measure(layer, Device::kCuda).peak;
  const size_t available = gpu_machine().available_memory();
  if (needed > available)
    throw std::runtime_error(layer.name + " needs " + bytes(static_cast<double>(needed)) +
                             " of the GPU's memory, but " + bytes(static_cast<double>(available)) +
                             " are free");
  return layer;
}

FirstCall measure_first_call(BenchLayer& layer, double context_ms) {
  layer.router();
  wait();
  const auto start = steady_clock::now();
  layer.library_forward();
  wait();
  return {.context = context_ms, .forward = milliseconds_since(start)};
}

// Milliseconds of the host for `body`, of some in a row as in a model's loop, each after what it
// needs; the GPU is idle before and after.
template <class Need, class Body>
double host_ms(Need&& need, Body&& body) {
  constexpr int kInARow = 4;
  double ms = 0;
  wait();
  for (int i = 0; i < kInARow; ++i) {
    need();
    const auto start = steady_clock::now();
    body();
    ms += milliseconds_since(start);
  }
  wait();
  return ms / kInARow;
}

// The GPU's clock: each step begins with a cold cache. Entries appear with collect().
class DeviceClock final : public StepClock {
 public:
  explicit DeviceClock(const DeviceCacheFlush& flush) : flush_(flush) {}
  // Waits for the steps.
  void collect() {
    for (const auto& span : spans_) add(span->step, span->end.ms_since(span->begin));
    spans_.clear();
  }

 private:
  struct Span {
    const char* step;
    Event begin, end;
  };
  void begin(const char* step) override {
    flush_();
    spans_.push_back(std::make_unique<Span>());
    spans_.back()->step = step;
    spans_.back()->begin.record();
  }
  void end(const char*) override { spans_.back()->end.record(); }

  const DeviceCacheFlush& flush_;
  std::vector<std::unique_ptr<Span>> spans_;
};

}  // namespace

class GpuMeasurement::Dense {
 public:
  Dense(const DenseProduct& product, DType dtype)
      : lt_({.M = product.rows,
             .N = product.columns,
             .K = product.depth,
             .A_transposed = product.A_transposed,
             .B_transposed = product.B_transposed,
             .operands = dtype,
             .result = dtype}) {}
  void choose(const void* A, const void* B, void* C, const DeviceCacheFlush& flush) {
    lt_.choose(A, B, C, flush);
  }
  double ms(const void* A, const void* B, void* C) {
    return device_ms([&] { lt_.run(A, B, C); });
  }

 private:
  LtProduct lt_;
};

GpuMeasurement::GpuMeasurement(const verify::Case& layer, GpuPasses passes, bool with_dense)
    : context_ms_(create_context_ms()),
      case_(fitting(layer)),
      passes_(passes),
      layer_(layer, gpu_machine(), passes.backward),
      first_(measure_first_call(layer_, context_ms_)),
      rows_(layer_.rows()) {
  if (with_dense && rows_ > 0) {
    int64_t A = 0, B = 0, C = 0;
    for (const DenseProduct& product : dense_products(layer, rows_)) {
      if (!(product.backward ? passes.backward : passes.forward)) continue;
      products_.push_back(product);
      A = std::max(A, product.rows * product.depth);
      B = std::max(B, product.depth * product.columns);
      C = std::max(C, product.rows * product.columns);
    }
    const auto take = [&](int64_t elements) {
      return MachineBuffer(gpu_machine(), layer.dtype, elements);
    };
    A_ = take(A), B_ = take(B), C_ = take(C);
    gpu_machine().fill_normal(layer.dtype, A_.data(), A, 0.2, 8);
    gpu_machine().fill_normal(layer.dtype, B_.data(), B, 0.02, 9);
    for (const DenseProduct& product : products_) {
      dense_.push_back(std::make_unique<Dense>(product, layer.dtype));
      dense_.back()->choose(A_.data(), B_.data(), C_.data(), flush_);
    }
  }
  for (int i = 0; i < 3; ++i) {
    layer_.forward();
    if (passes.backward) layer_.backward();
  }
  wait();
}

GpuMeasurement::~GpuMeasurement() = default;

const GpuRound& GpuMeasurement::run_round() {
  GpuRound round;
  flush_();
  round.forward = device_ms([&] { layer_.forward(); });
  if (passes_.backward) {
    flush_();
    round.backward = device_ms([&] { layer_.backward(); });
  }
  rounds_.push_back(round);
  return rounds_.back();
}

void GpuMeasurement::run_step_round() {
  StepRound round;
  const auto forward = [&] { layer_.forward(); };
  round.forward.host = host_ms([] {}, forward);
  if (passes_.backward) round.backward.host = host_ms(forward, [&] { layer_.backward(); });

  DeviceClock forward_clock(flush_), backward_clock(flush_);
  layer_.forward(&forward_clock);
  if (passes_.backward) layer_.backward(&backward_clock);
  forward_clock.collect(), backward_clock.collect();
  round.forward.steps = forward_clock.entries();
  round.backward.steps = backward_clock.entries();

  for (const auto& product : dense_) {
    flush_();
    round.dense.push_back(product->ms(A_.data(), B_.data(), C_.data()));
  }
  step_rounds_.push_back(std::move(round));
}

}  // namespace tilemoe::app
