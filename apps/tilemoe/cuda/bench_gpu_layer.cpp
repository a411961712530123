#include "cuda/bench_gpu_layer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cuda/random_fill.h"
#include "layer.h"
#include "table.h"
#include "verify/random.h"

namespace tilemoe::app {
namespace {

using verify::Case;
using verify::Load;
using verify::RoutingKind;

template <class Body>
void timed(StepClock* clock, const char* name, Body&& body) {
  if (clock)
    clock->time(name, body);
  else
    body();
}

// Before anything is allocated.
const Case& fitting(const Case& layer) {
  const bool routed = layer.routing == RoutingKind::kTopK || layer.routing == RoutingKind::kRounded;
  if (!routed || layer.dtype == DType::kFloat32)
    throw std::runtime_error(layer.name +
                             ": bench times layers that route by their logits, on a GPU in "
                             "bfloat16 or float16");
  const Experts experts = layer.experts(Device::kCuda);
  const RoutingSpec spec = layer.spec(0, Device::kCuda);
  const auto elements =
      layer.E * (layer.h_width() * layer.d + layer.d * layer.n + layer.d) + layer.T * layer.d;
  const size_t needed = size_of(layer.dtype) * static_cast<size_t>(elements) +
                        experts.saved_bytes(spec).total +
                        experts.workspace_bytes(spec, Pass::kForward) +
                        2 * sizeof(float) * static_cast<size_t>(layer.T * (layer.E + layer.K));
  size_t available = 0, all = 0;
  check_cuda(cudaMemGetInfo(&available, &all), "cudaMemGetInfo");
  if (needed > available)
    throw std::runtime_error(layer.name + " needs " + bytes(static_cast<double>(needed)) +
                             " of the GPU's memory, but " + bytes(static_cast<double>(available)) +
                             " are free");
  return layer;
}

// log p(e) + Gumbel noise: top-K of these draws K experts without replacement by their popularity
// p, 1 / (e + 1) or all of it one expert's.
std::vector<float> skewed_logits(const Case& layer) {
  constexpr double kCertain = 100;
  std::vector<float> logits(static_cast<size_t>(layer.T * layer.E));
  verify::Random random(6, 6);
  for (int64_t t = 0, i = 0; t < layer.T; ++t)
    for (int64_t e = 0; e < layer.E; ++e, ++i) {
      const double uniform = (static_cast<double>(random.below(int64_t{1} << 30)) + 0.5) * 0x1p-30;
      const double popularity = layer.load == Load::kOneExpert
                                    ? (e == layer.E / 2 ? kCertain : 0)
                                    : -std::log(static_cast<double>(e + 1));
      logits[static_cast<size_t>(i)] =
          static_cast<float>(popularity - std::log(-std::log(uniform)));
    }
  return logits;
}

}  // namespace

void DeviceClock::begin(const char* step) {
  flush_();
  spans_.push_back(std::make_unique<Span>());
  spans_.back()->step = step;
  spans_.back()->begin.record();
}

void DeviceClock::end(const char*) {
  spans_.back()->end.record();
}

void DeviceClock::collect() {
  for (const auto& span : spans_) add(span->step, span->end.ms_since(span->begin));
  spans_.clear();
}

GpuLayer::GpuLayer(const Case& layer)
    : case_(fitting(layer)),
      experts_(layer.experts(Device::kCuda)),
      spec_(layer.spec(0, Device::kCuda)),
      W1_(layer.dtype, layer.E * layer.h_width() * layer.d),
      W2_(layer.dtype, layer.E * layer.d * layer.n),
      Wr_(layer.dtype, layer.E * layer.d),
      X_(layer.dtype, layer.T * layer.d),
      O_(layer.dtype, layer.T * layer.d),
      H_(layer.dtype, spec_.bound() * layer.h_width()),
      logits_(DType::kFloat32, layer.T * layer.E),
      ids_(DType::kInt32, layer.T * layer.K),
      scores_(DType::kFloat32, layer.T * layer.K),
      routing_memory_(spec_.bytes()),
      routing_workspace_(spec_.workspace_bytes()),
      workspace_(experts_.workspace_bytes(spec_, Pass::kForward)),
      router_({.M = layer.T,
               .N = layer.E,
               .K = layer.d,
               .operands = layer.dtype,
               .result = DType::kFloat32}),
      routing_(spec_, routing_memory_.data(), routing_memory_.bytes()),
      saved_(Tensor(H_.data(), layer.dtype, {spec_.bound(), layer.h_width()})) {
  fill();
  router_.choose(X_.data(), Wr_.data(), logits_.data(), DeviceCacheFlush());
}

void GpuLayer::fill() {
  fill_normal(X_, case_.dtype, 0.2, 1);
  fill_normal(W1_, case_.dtype, 0.02, 3);
  fill_normal(W2_, case_.dtype, 0.02, 4);
  fill_normal(Wr_, case_.dtype, 1 / std::sqrt(static_cast<double>(case_.d)), 5);
  if (case_.load == Load::kRandom) return;
  const std::vector<float> logits = skewed_logits(case_);
  chosen_logits_ = DeviceBuffer(logits_.bytes());
  chosen_logits_.write(logits.data(), logits_.bytes());
}

void GpuLayer::router() {
  router_.run(X_.data(), Wr_.data(), logits_.data());
}

// A skewed load has its logits prepared; the router's product runs all the same.
void GpuLayer::route(StepClock* clock) {
  const DeviceBuffer& source = case_.load == Load::kRandom ? logits_ : chosen_logits_;
  const Tensor logits(source.data(), DType::kFloat32, {case_.T, case_.E});
  if (case_.routing == RoutingKind::kRounded) {
    timed(clock, step::kRoute, [&] {
      routing_.from_logits_rounded(logits, routing_workspace_.data(), routing_workspace_.bytes());
    });
    return;
  }
  const Tensor ids(ids_.data(), DType::kInt32, {case_.T, case_.K});
  const Tensor scores(scores_.data(), DType::kFloat32, {case_.T, case_.K});
  timed(clock, step::kTopK,
        [&] { top_k(case_.scoring, case_.K, logits, ids, scores, {}, {}, Device::kCuda); });
  timed(clock, step::kRoute, [&] {
    routing_.from_top_k(ids, scores, routing_workspace_.data(), routing_workspace_.bytes());
  });
}

void GpuLayer::library(StepClock* clock) {
  route(clock);
  const int64_t T = case_.T, d = case_.d, n = case_.n, E = case_.E;
  ForwardArgs args;
  args.routing = &routing_;
  args.weights.W1 = Tensor(W1_.data(), case_.dtype, {E, case_.h_width(), d});
  args.weights.W2 = Tensor(W2_.data(), case_.dtype, {E, d, n});
  args.X = Tensor(X_.data(), case_.dtype, {T, d}), args.O = Tensor(O_.data(), case_.dtype, {T, d});
  args.saved = &saved_;
  args.workspace = workspace_.data(), args.workspace_bytes = workspace_.bytes();
  if (!clock) return experts_.forward(args);
  TimedBackend steps(backend_for(experts_.device), *clock);
  tilemoe::forward(&experts_, &args, &steps);
}

void GpuLayer::forward(StepClock* clock) {
  timed(clock, step::kRouter, [&] { router(); });
  library(clock);
}

int64_t GpuLayer::rows() const {
  int32_t M = 0;
  check_cuda(cudaMemcpy(&M, routing_.offsets + case_.E, sizeof M, cudaMemcpyDeviceToHost),
             "a copy from the GPU");
  return M;
}

}  // namespace tilemoe::app
