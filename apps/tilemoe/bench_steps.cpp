#include "bench_steps.h"

namespace tilemoe::app {

void StepClock::add(const char* step, double ms) {
  for (Entry& entry : entries_) {
    if (entry.step != step) continue;
    entry.ms += ms;
    return;
  }
  entries_.push_back({step, ms});
}

std::vector<DenseProduct> dense_products(const verify::Case& layer, int64_t rows) {
  const int64_t d = layer.d, n = layer.n, h = layer.h_width();
  return {
      {step::kUpProjection, false, rows, h, d, false, true},        // X W1^T
      {step::kDownProjection, false, rows, d, n, false, true},      // A W2^T
      {step::kActivationGradient, true, rows, n, d, false, false},  // dO W2
      {step::kWeightGradient2, true, d, n, rows, true, false},      // dO^T A'
      {step::kInputGradient, true, rows, d, h, false, false},       // dH W1
      {step::kWeightGradient1, true, h, d, rows, true, false},      // dH^T X
  };
}

Work work_of(const std::string& name, const verify::Case& layer, int64_t rows) {
  const auto element = static_cast<double>(size_of(layer.dtype));
  const auto T = static_cast<double>(layer.T), d = static_cast<double>(layer.d),
             n = static_cast<double>(layer.n), E = static_cast<double>(layer.E),
             K = static_cast<double>(layer.K), M = static_cast<double>(rows),
             h = static_cast<double>(layer.h_width());
  const double logits = element * T * E, chosen = T * K * (sizeof(int32_t) + sizeof(float));
  const double tokens = element * T * d;
  const double pair = sizeof(int32_t) + sizeof(float) + sizeof(int32_t);  // of the routing object
  const double W1 = element * E * h * d, W2 = element * E * d * n, router = element * E * d;
  if (name == step::kRouter) return {2 * T * d * E, tokens + router + logits};
  if (name == step::kTopK) return {0, logits + chosen};
  if (name == step::kRoute) return {0, chosen + M * pair};
  if (name == step::kUpProjection) return {2 * M * d * h, tokens + W1 + element * M * (h + n)};
  if (name == step::kDownProjection) return {2 * M * n * d, element * M * (n + d) + W2};
  if (name == step::kCombine) return {2 * M * d, element * M * d + tokens};
  if (name == step::kCombineGradient) return {2 * M * d, element * M * d + 2 * tokens};
  if (name == step::kActivationGradient)
    return {2 * M * d * n, tokens + W2 + element * M * (2 * h + n)};
  if (name == step::kWeightGradient2) return {2 * M * d * n, tokens + element * M * n + W2};
  if (name == step::kInputGradient) return {2 * M * d * h, element * M * (h + d) + W1};
  if (name == step::kWeightGradient1) return {2 * M * d * h, tokens + element * M * h + W1};
  if (name == step::kRouterBackward) return {0, chosen + logits};
  if (name == step::kRouterGradient) return {4 * T * d * E, 2 * tokens + 2 * router + logits};
  if (name == step::kBiasGradient) return {M * (h + d), tokens + element * (M * h + E * (h + d))};
  return {};  // the score gradient, which adds up a few numbers a row
}

}  // namespace tilemoe::app
