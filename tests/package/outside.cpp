// A C++ program outside TileMoE: router, forward and backward of a SwiGLU layer. O is compared with
// plain loops in double, dX with differences of the same loops.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "tilemoe/layer.h"
#include "tilemoe/routing.h"

namespace {

constexpr int64_t T = 6, d = 16, n = 8, E = 4, K = 2;

// Memory on 16 bytes: operator new's own alignment on every 64-bit machine.
template <class Element>
using Buffer = std::vector<Element>;

Buffer<float> gaussian(int64_t count, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0, scale);
  Buffer<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

struct Problem {
  Buffer<float> W1 = gaussian(E * 2 * n * d, 0.25f, 1);  // (E, 2n, d)
  Buffer<float> W2 = gaussian(E * d * n, 0.35f, 2);      // (E, d, n)
  Buffer<int32_t> ids = Buffer<int32_t>(T * K);          // (T, K)
  Buffer<float> scores = Buffer<float>(T * K);           // (T, K)
};

// Row t of O, in double, for the given X_t.
std::vector<double> output_row(const Problem& p, int64_t t, const std::vector<double>& x) {
  std::vector<double> out(d, 0.0);
  for (int64_t k = 0; k < K; ++k) {
    const int64_t e = p.ids[t * K + k];
    for (int64_t j = 0; j < n; ++j) {
      double gate = 0, up = 0;
      for (int64_t i = 0; i < d; ++i) {
        gate += x[i] * p.W1[(e * 2 * n + j) * d + i];
        up += x[i] * p.W1[(e * 2 * n + n + j) * d + i];
      }
      const double a = gate / (1 + std::exp(-gate)) * up;
      for (int64_t i = 0; i < d; ++i) out[i] += p.scores[t * K + k] * a * p.W2[(e * d + i) * n + j];
    }
  }
  return out;
}

bool near(const char* name, int64_t index, double found, double expected, double tolerance) {
  if (std::abs(found - expected) <= tolerance) return true;
  std::fprintf(stderr, "%s[%lld] is %.9g, expected %.9g\n", name, static_cast<long long>(index),
               found, expected);
  return false;
}

}  // namespace

int main() try {
  using tilemoe::Device;
  using tilemoe::DType;
  using tilemoe::Tensor;
  Problem p;
  const auto X = gaussian(T * d, 1, 3), dO = gaussian(T * d, 1, 4), logits = gaussian(T * E, 1, 5);
  Buffer<float> O(T * d), dX(T * d);

  tilemoe::top_k({.device = Device::kCpu,
                  .scoring = tilemoe::Scoring::kSoftmaxRenormalized,
                  .K = K,
                  .logits = {logits.data(), DType::kFloat32, {T, E}},
                  .ids = {p.ids.data(), DType::kInt32, {T, K}},
                  .scores = {p.scores.data(), DType::kFloat32, {T, K}}});

  const auto spec = tilemoe::RoutingSpec::top_k(Device::kCpu, T, E, K);
  const tilemoe::Experts experts{.device = Device::kCpu, .d = d, .n = n, .E = E};
  Buffer<char> routing_memory(spec.bytes());
  Buffer<char> workspace(
      std::max({spec.workspace_bytes(), experts.workspace_bytes(spec, tilemoe::Pass::kForward),
                experts.workspace_bytes(spec, tilemoe::BackwardMode::kWhole)}));
  tilemoe::Routing routing(spec, routing_memory.data(), routing_memory.size());
  routing.from_top_k(Tensor(p.ids.data(), DType::kInt32, {T, K}),
                     Tensor(p.scores.data(), DType::kFloat32, {T, K}), workspace.data(),
                     workspace.size());

  Buffer<float> H(static_cast<size_t>(routing.capacity() * experts.h_width()));
  tilemoe::Saved saved(Tensor(H.data(), DType::kFloat32, {routing.capacity(), experts.h_width()}));
  tilemoe::ForwardArgs forward;
  forward.routing = &routing;
  forward.weights.W1 = Tensor(p.W1.data(), DType::kFloat32, {E, 2 * n, d});
  forward.weights.W2 = Tensor(p.W2.data(), DType::kFloat32, {E, d, n});
  forward.X = {X.data(), DType::kFloat32, {T, d}};
  forward.O = Tensor(O.data(), DType::kFloat32, {T, d});
  forward.saved = &saved;
  forward.workspace = workspace.data(), forward.workspace_bytes = workspace.size();
  experts.forward(forward);

  tilemoe::BackwardArgs backward;
  backward.routing = &routing;
  backward.weights = forward.weights;
  backward.X = forward.X;
  backward.dO = {dO.data(), DType::kFloat32, {T, d}};
  backward.saved = &saved;
  backward.dX = Tensor(dX.data(), DType::kFloat32, {T, d});
  backward.workspace = workspace.data(), backward.workspace_bytes = workspace.size();
  experts.backward(backward);

  bool good = true;
  for (int64_t t = 0; t < T; ++t) {
    const std::vector<double> x(X.begin() + t * d, X.begin() + (t + 1) * d);
    const auto out = output_row(p, t, x);
    for (int64_t i = 0; i < d; ++i) good &= near("O", t * d + i, O[t * d + i], out[i], 1e-5);
    for (int64_t i = 0; i < d; ++i) {
      constexpr double kStep = 1e-5;
      auto above = x, below = x;
      above[i] += kStep, below[i] -= kStep;
      const auto high = output_row(p, t, above), low = output_row(p, t, below);
      double slope = 0;
      for (int64_t c = 0; c < d; ++c) slope += dO[t * d + c] * (high[c] - low[c]) / (2 * kStep);
      good &= near("dX", t * d + i, dX[t * d + i], slope, 1e-4);
    }
  }

  try {
    forward.workspace_bytes = 0;
    experts.forward(forward);
    std::fprintf(stderr, "a workspace of 0 bytes was taken\n");
    good = false;
  } catch (const tilemoe::Error& error) {
    good &= error.status() == tilemoe::Status::kInvalidArgument;
  }
  if (good) std::printf("tilemoe %s from C++: O and dX are right\n", tilemoe_version());
  return good ? 0 : 1;
} catch (const tilemoe::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
