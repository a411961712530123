#include "train/sampling.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "train/ops/shapes.h"
#include "train/random.h"

namespace tilemoe::train {
namespace {

// The byte at which the running sum of exp((logit - max) / temperature) passes `place` of the
// whole.
uint8_t pick(ConstFloats logits, double temperature, double place) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (temperature == 0) return static_cast<uint8_t>(best - logits.begin());
  std::vector<double> sums(logits.size());
  double sum = 0;
  for (size_t v = 0; v < logits.size(); ++v)
    sums[v] = sum += std::exp((static_cast<double>(logits[v]) - *best) / temperature);
  const auto picked = std::upper_bound(sums.begin(), sums.end(), place * sum);
  return static_cast<uint8_t>(std::min<int64_t>(picked - sums.begin(), kByteValues - 1));
}

}  // namespace

void sample(Model& model, const SamplingConfig& config, const std::function<bool(char)>& take) {
  const RandomStream random(config.seed, "sample");
  const auto longest = static_cast<size_t>(model.capacity().length);
  // The model sees zeros before the first byte, as at the start of a text.
  const auto past = static_cast<size_t>(model.past());
  std::vector<uint8_t> text(past, 0);
  text.push_back('\n');
  text.insert(text.end(), config.prompt.begin(), config.prompt.end());
  for (int64_t i = 0; i < config.bytes; ++i) {
    const size_t seen = std::min(text.size() - past, longest);
    const ConstFloats logits =
        model.logits({1, static_cast<int64_t>(seen)}, ConstBytes(text).last(past + seen));
    text.push_back(pick(logits.last(kByteValues), config.temperature,
                        random.uniform(static_cast<uint64_t>(i))));
    if (!take(static_cast<char>(text.back()))) return;
  }
}

std::string sample(Model& model, const SamplingConfig& config) {
  std::string text;
  sample(model, config, [&](char byte) {
    text += byte;
    return true;
  });
  return text;
}

}  // namespace tilemoe::train
