#include "timed_layer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "layer/layer.h"
#include "table.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::app {
namespace {

using verify::Case;
using verify::Load;
using verify::RoutingKind;

constexpr size_t kAlignment = 256;

template <class Body>
void observed(StepObserver* observer, const char* name, Body&& body) {
  if (observer) observer->begin(name);
  body();
  if (observer) observer->end(name);
}

int64_t elements_of(const Tensor& tensor) {
  int64_t elements = 1;
  for (int i = 0; i < tensor.ndim; ++i) elements *= tensor.shape[i];
  return elements;
}

void check_timed(const Case& layer) {
  const bool routed = layer.routing == RoutingKind::kTopK || layer.routing == RoutingKind::kRounded;
  if (!routed || layer.padded || layer.load == Load::kHalfEmpty)
    throw std::runtime_error(layer.name +
                             ": only layers that route by their logits, with dense weights and "
                             "random, zipf or one-expert loads, can be timed");
}

// The logits that a scoring's gradient reads.
bool gradient_reads_logits(const Case& layer) {
  return layer.routing == RoutingKind::kRounded || layer.scoring != Scoring::kSoftmaxOverChosen;
}

// Token rounding renormalizes the scores, whatever the case says.
Scoring scoring_of(const Case& layer) {
  return layer.routing == RoutingKind::kRounded ? Scoring::kSoftmaxRenormalized : layer.scoring;
}

BackwardMode mode_of(const Case& layer) {
  return layer.dH_over_H ? BackwardMode::kOverH : BackwardMode::kWhole;
}

}  // namespace

void* Arena::take(size_t bytes) {
  const size_t place = used_;
  used_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return memory_ ? memory_ + place : nullptr;
}

Tensor Arena::take(DType dtype, std::initializer_list<int64_t> shape) {
  const Tensor sizes(nullptr, dtype, shape);
  return Tensor(take(size_of(dtype) * static_cast<size_t>(elements_of(sizes))), dtype, shape);
}

std::shared_ptr<void> allocate(verify::Memory& memory, size_t bytes) {
  return {memory.allocate(std::max(bytes, size_t{1})), [&memory](void* place) {
            if (place) memory.release(place);
          }};
}

void fill_normal(verify::Memory& memory, const Tensor& tensor, double scale, int64_t seed) {
  constexpr int64_t kBlock = 4194301, kShift = 1000003;
  static const std::vector<float> normals = [] {
    verify::Random random(1, 1);
    std::vector<float> values(kBlock);
    for (float& value : values) value = static_cast<float>(random.normal());
    return values;
  }();
  if (!tensor.present()) return;
  const auto dtype = static_cast<DType>(tensor.dtype);
  const int64_t elements = elements_of(tensor);
  const int64_t drawn = std::min(kBlock, elements);
  std::vector<std::byte> block(size_of(dtype) * static_cast<size_t>(drawn));
  for (int64_t i = 0; i < drawn; ++i)
    verify::store(dtype, block.data(), i,
                  scale * double{normals[static_cast<size_t>((i + seed * kShift) % kBlock)]});
  const size_t all = size_of(dtype) * static_cast<size_t>(elements);
  for (size_t have = 0; have < all; have += block.size())
    memory.copy_in(static_cast<std::byte*>(tensor.data) + have, block.data(),
                   std::min(block.size(), all - have));
}

// Skewed loads: log p(e) + Gumbel noise. Top-K of these draws K experts without replacement by
// their popularity p, 1 / (e + 1) or all of it one expert's.
void fill_logits(verify::Memory& memory, const Tensor& logits, Load load) {
  constexpr double kCertain = 100;
  if (load == Load::kRandom) return fill_normal(memory, logits, 1, 6);
  const auto dtype = static_cast<DType>(logits.dtype);
  const int64_t E = logits.shape[1];
  std::vector<std::byte> values(size_of(dtype) * static_cast<size_t>(elements_of(logits)));
  verify::Random random(6, 6);
  for (int64_t t = 0, i = 0; t < logits.shape[0]; ++t)
    for (int64_t e = 0; e < E; ++e, ++i) {
      const double uniform = (static_cast<double>(random.below(int64_t{1} << 30)) + 0.5) * 0x1p-30;
      const double popularity = load == Load::kOneExpert ? (e == E / 2 ? kCertain : 0)
                                                         : -std::log(static_cast<double>(e + 1));
      verify::store(dtype, values.data(), i, popularity - std::log(-std::log(uniform)));
    }
  memory.copy_in(logits.data, values.data(), values.size());
}

TimedTensors::TimedTensors(const Case& layer, Device device, Arena& arena) {
  const int64_t T = layer.T, d = layer.d, n = layer.n, E = layer.E, K = layer.K;
  const int64_t h = layer.h_width();
  const bool split = layer.gate_layout == GateLayout::kSplit;
  const int64_t rows_1 = split ? n : h;  // of W1
  const Experts experts = layer.experts(device);
  const RoutingSpec spec = layer.spec(0, device);
  const auto weight = [&](int64_t rows, int64_t columns, bool transposed) {
    return transposed ? arena.take(layer.dtype, {E, columns, rows}).transposed()
                      : arena.take(layer.dtype, {E, rows, columns});
  };
  for (Tensor* tokens : {&X, &O, &dO, &dX}) *tokens = arena.take(layer.dtype, {T, d});
  H = arena.take(layer.dtype, {spec.bound(), h});
  // A weight, unless it is quantised, and its gradient if that is computed.
  const auto weights = [&](Tensor& W, Tensor& dW, bool stored, bool wanted, const auto& take) {
    if (stored) W = take();
    if (wanted) dW = take();
  };
  const verify::Gradients& wanted = layer.wanted;
  weights(W1, dW1, layer.format_1 == Format::kNone, wanted.dW1,
          [&] { return weight(rows_1, d, layer.W1_transposed); });
  if (split)
    weights(W1_up, dW1_up, layer.format_1 == Format::kNone, wanted.dW1,
            [&] { return weight(n, d, layer.W1_transposed); });
  weights(W2, dW2, layer.format_2 == Format::kNone, wanted.dW2,
          [&] { return weight(d, n, layer.W2_transposed); });
  if (layer.biases) {
    weights(b1, db1, true, wanted.db1, [&] { return arena.take(layer.dtype, {E, rows_1}); });
    if (split)
      weights(b1_up, db1_up, true, wanted.db1, [&] { return arena.take(layer.dtype, {E, n}); });
    weights(b2, db2, true, wanted.db2, [&] { return arena.take(layer.dtype, {E, d}); });
  }
  const DType factor = layer.factor_dtype();
  for (LoraGradients* one : {&lora, &dlora}) {
    if (const int64_t rank = layer.lora.gate; rank > 0)
      one->A1 = arena.take(factor, {E, rank, d}), one->B1 = arena.take(factor, {E, rows_1, rank});
    if (const int64_t rank = layer.lora.up; rank > 0)
      one->A1_up = arena.take(factor, {E, rank, d}), one->B1_up = arena.take(factor, {E, n, rank});
    if (const int64_t rank = layer.lora.rank_2(); rank > 0)
      one->A2 = arena.take(factor, {E, rank, n}), one->B2 = arena.take(factor, {E, d, rank});
  }
  if (layer.lora.rank_1() > 0) P1 = arena.take(layer.dtype, {spec.bound(), layer.lora.rank_1()});
  if (layer.lora.rank_2() > 0) P2 = arena.take(layer.dtype, {spec.bound(), layer.lora.rank_2()});
  for (Tensor* one : {&logits, &dlogits}) *one = arena.take(layer.dtype, {T, E});
  ids = arena.take(DType::kInt32, {T, K});
  scores = arena.take(DType::kFloat32, {T, K});
  ds = arena.take(DType::kFloat32, {spec.bound()});
  routing_bytes = spec.bytes();
  routing_workspace_bytes = spec.workspace_bytes();
  workspace_bytes = std::max(experts.workspace_bytes(spec, Pass::kForward),
                             experts.workspace_bytes(spec, mode_of(layer)));
  routing = arena.take(routing_bytes);
  routing_workspace = arena.take(routing_workspace_bytes);
  workspace = arena.take(workspace_bytes);
  packed_lora_bytes = layer.lora.any() ? experts.packed_lora_bytes() : 0;
  packed_lora = arena.take(packed_lora_bytes);
}

size_t TimedLayer::bytes(const Case& layer, Device device) {
  check_timed(layer);
  Arena sizes;
  const TimedTensors tensors(layer, device, sizes);
  return sizes.bytes();
}

TimedLayer::TimedLayer(const Case& layer, Device device)
    : case_(layer), memory_(verify::memory_of(device)), experts_(layer.experts(device)) {
  const size_t needed = bytes(layer, device);
  try {
    allocation_ = allocate(memory_, needed);
  } catch (const std::exception& error) {
    throw std::runtime_error(layer.name + " requires " + app::bytes(static_cast<double>(needed)) +
                             " of memory: " + error.what());
  }
  Arena arena(allocation_.get());
  const TimedTensors& t = tensors_.emplace(layer, device, arena);
  const RoutingSpec spec = layer.spec(0, device);
  routing_.emplace(spec, t.routing, t.routing_bytes);
  quantized_.emplace(layer, memory_);
  saved_ = Saved(t.H, t.P1, t.P2);
  fill_normal(memory_, t.X, 0.2, 1), fill_normal(memory_, t.dO, 0.2, 2);
  fill_normal(memory_, t.W1, 0.02, 3), fill_normal(memory_, t.W2, 0.02, 4);
  fill_normal(memory_, t.W1_up, 0.02, 11), fill_normal(memory_, t.b1_up, 0.02, 5);
  fill_normal(memory_, t.b1, 0.02, 5), fill_normal(memory_, t.b2, 0.02, 5);
  fill_normal(memory_, t.lora.A1, 0.02, 7), fill_normal(memory_, t.lora.B1, 0.02, 8);
  fill_normal(memory_, t.lora.A1_up, 0.02, 12), fill_normal(memory_, t.lora.B1_up, 0.02, 13);
  fill_normal(memory_, t.lora.A2, 0.02, 9), fill_normal(memory_, t.lora.B2, 0.02, 10);
  fill_logits(memory_, t.logits, layer.load);
}

void TimedLayer::route(StepObserver* observer) {
  const TimedTensors& t = *tensors_;
  if (case_.routing == RoutingKind::kRounded) {
    observed(observer, step::route, [&] {
      routing_->from_logits({.logits = t.logits,
                             .workspace = t.routing_workspace,
                             .workspace_bytes = t.routing_workspace_bytes});
    });
    return;
  }
  observed(observer, step::top_k, [&] {
    top_k({.device = memory_.device(),
           .scoring = case_.scoring,
           .K = case_.K,
           .logits = t.logits,
           .ids = tilemoe_tensor(t.ids),
           .scores = tilemoe_tensor(t.scores)});
  });
  observed(observer, step::route, [&] {
    routing_->from_top_k(t.ids, t.scores, t.routing_workspace, t.routing_workspace_bytes);
  });
}

Weights TimedLayer::weights() const {
  const TimedTensors& t = *tensors_;
  return {.W1 = t.W1, .W1_up = t.W1_up, .W2 = t.W2, .b1 = t.b1, .b1_up = t.b1_up, .b2 = t.b2};
}

// As after each step of an optimizer.
void TimedLayer::pack_lora(StepObserver* observer) {
  if (!case_.lora.any()) return;
  const TimedTensors& t = *tensors_;
  const Lora lora{.A1 = t.lora.A1,
                  .B1 = t.lora.B1,
                  .A1_up = t.lora.A1_up,
                  .B1_up = t.lora.B1_up,
                  .A2 = t.lora.A2,
                  .B2 = t.lora.B2,
                  .scale_1 = case_.lora.scale_1,
                  .scale_2 = case_.lora.scale_2};
  observed(observer, step::pack_lora, [&] {
    packed_lora_ = experts_.pack_lora(lora, weights(), t.packed_lora, t.packed_lora_bytes);
  });
}

void TimedLayer::forward(StepObserver* observer) {
  route(observer);
  pack_lora(observer);
  const TimedTensors& t = *tensors_;
  ForwardArgs args;
  args.routing = &*routing_;
  args.weights = weights();
  args.X = t.X, args.O = tilemoe_tensor(t.O);
  args.saved = &saved_;
  args.quantized = quantized_->view();
  args.workspace = t.workspace, args.workspace_bytes = t.workspace_bytes;
  if (case_.lora.any()) args.lora = &packed_lora_;
  const tilemoe_experts experts = experts_.to_c();
  const tilemoe_weights all = args.weights.to_c();
  const tilemoe_forward_args c_args = args.to_c(all);
  tilemoe::forward(&experts, &c_args, observer);
}

void TimedLayer::backward(StepObserver* observer) {
  const TimedTensors& t = *tensors_;
  const Tensor ds(t.ds.data, DType::kFloat32, {routing_->pairs()});
  BackwardArgs args;
  args.mode = mode_of(case_);
  args.routing = &*routing_;
  args.weights = weights();
  args.X = t.X, args.dO = t.dO;
  args.saved = &saved_;
  args.quantized = quantized_->view();
  args.dX = tilemoe_tensor(t.dX);
  args.dweights.W1 = tilemoe_tensor(t.dW1), args.dweights.W2 = tilemoe_tensor(t.dW2);
  args.dweights.W1_up = tilemoe_tensor(t.dW1_up);
  args.dweights.b1_up = tilemoe_tensor(t.db1_up);
  args.dweights.b1 = tilemoe_tensor(t.db1), args.dweights.b2 = tilemoe_tensor(t.db2);
  args.ds = tilemoe_tensor(ds);
  args.workspace = t.workspace, args.workspace_bytes = t.workspace_bytes;
  if (case_.lora.any()) args.lora = &packed_lora_, args.dlora = t.dlora;
  const tilemoe_experts experts = experts_.to_c();
  const tilemoe_weights all = args.weights.to_c(), dweights = args.dweights.to_c();
  const tilemoe_lora dlora = args.dlora.to_c();
  const tilemoe_backward_args c_args = args.to_c(all, dweights, dlora);
  tilemoe::backward(&experts, &c_args, observer);
  observed(observer, step::router_backward, [&] {
    router_backward({.scoring = scoring_of(case_),
                     .routing = &*routing_,
                     .logits = gradient_reads_logits(case_) ? ConstTensor(t.logits) : ConstTensor(),
                     .ds = ds,
                     .dlogits = tilemoe_tensor(t.dlogits),
                     .workspace = t.routing_workspace,
                     .workspace_bytes = t.routing_workspace_bytes});
  });
}

int64_t TimedLayer::rows() const {
  int32_t M = 0;
  memory_.copy_out(&M, routing_->offsets + case_.E, sizeof M);
  return M;
}

}  // namespace tilemoe::app
