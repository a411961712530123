// One Mixture-of-Experts layer, forward and backward, on the CPU: what each call needs and gives.
// Built by the project as `example_layer`; outside it, find_package(TileMoE) and link
// TileMoE::tilemoe.
#include <tilemoe/layer.h>

#include <cstdio>
#include <cstdlib>
#include <new>
#include <random>
#include <vector>

namespace {

// The library takes pointers on 16 bytes; this hands out zeroed memory on 64.
class Buffer {
 public:
  explicit Buffer(size_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {
    if (data_ == nullptr && bytes != 0) throw std::bad_alloc();
    for (size_t i = 0; i < bytes; ++i) static_cast<char*>(data_)[i] = 0;
  }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  float* floats() const { return static_cast<float*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

void fill_normal(const Buffer& buffer, float deviation, std::mt19937& generator) {
  std::normal_distribution<float> normal(0, deviation);
  for (size_t i = 0; i < buffer.bytes() / sizeof(float); ++i)
    buffer.floats()[i] = normal(generator);
}

size_t float_bytes(int64_t count) {
  return static_cast<size_t>(count) * sizeof(float);
}

int run() {
  using namespace tilemoe;
  const int64_t T = 1024, d = 256, n = 128, E = 16, K = 2;

  // Sizes come first, from the shapes alone.
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, T, E, K);
  const Experts experts{// float32, SwiGLU, gate rows then up rows
                        .device = Device::kCpu,
                        .d = d,
                        .n = n,
                        .E = E};
  const tilemoe_saved_size saved_size = experts.saved_bytes(spec);

  // Inputs and weights.
  std::mt19937 generator(1);
  const Buffer x(float_bytes(T * d)), logits(float_bytes(T * E));
  const Buffer w1(float_bytes(E * 2 * n * d)), w2(float_bytes(E * d * n));
  fill_normal(x, 1, generator);
  fill_normal(logits, 1, generator);
  fill_normal(w1, 1 / 16.f, generator);  // 1 / sqrt(d)
  fill_normal(w2, 1 / 11.f, generator);  // 1 / sqrt(n)

  // Routing: the top K of each token's logits, then the routing object of the batch.
  const Buffer ids(float_bytes(T * K)), scores(float_bytes(T * K));
  const Buffer routing_memory(spec.bytes()), routing_workspace(spec.workspace_bytes());
  const Tensor logits_view(logits.data(), DType::kFloat32, {T, E});
  const Tensor ids_view(ids.data(), DType::kInt32, {T, K});
  const Tensor scores_view(scores.data(), DType::kFloat32, {T, K});
  top_k({.device = Device::kCpu,
         .scoring = Scoring::kSoftmaxOverChosen,
         .K = K,
         .logits = logits_view,
         .ids = ids_view,
         .scores = scores_view});
  Routing routing(spec, routing_memory.data(), routing_memory.bytes());
  routing.from_top_k(ids_view, scores_view, routing_workspace.data(), routing_workspace.bytes());

  // Forward. H is what backward needs besides X and the routing.
  const Buffer h(saved_size.H), o(float_bytes(T * d));
  const Buffer forward_workspace(experts.workspace_bytes(spec, Pass::kForward));
  Saved saved(Tensor(h.data(), DType::kFloat32, {routing.capacity(), experts.h_width()}));
  const ForwardArgs forward{.routing = &routing,
                            .weights = {.W1 = {w1.data(), DType::kFloat32, {E, 2 * n, d}},
                                        .W2 = {w2.data(), DType::kFloat32, {E, d, n}}},
                            .X = {x.data(), DType::kFloat32, {T, d}},
                            .O = {o.data(), DType::kFloat32, {T, d}},
                            .saved = &saved,
                            .workspace = forward_workspace.data(),
                            .workspace_bytes = forward_workspace.bytes()};
  experts.forward(forward);

  // Backward of the loss |O|^2 / 2, so dO = O. Gradients left absent are not computed.
  const Buffer dx(float_bytes(T * d)), dw1(w1.bytes()), dw2(w2.bytes());
  const Buffer ds(float_bytes(T * K)), dlogits(logits.bytes());
  const Buffer backward_workspace(experts.workspace_bytes(spec, BackwardMode::kWhole));
  const BackwardArgs backward{.routing = &routing,
                              .weights = forward.weights,
                              .X = forward.X,
                              .dO = forward.O,
                              .saved = &saved,
                              .dX = {dx.data(), DType::kFloat32, {T, d}},
                              .dweights = {.W1 = {dw1.data(), DType::kFloat32, {E, 2 * n, d}},
                                           .W2 = {dw2.data(), DType::kFloat32, {E, d, n}}},
                              .ds = {ds.data(), DType::kFloat32, {T, K}},
                              .workspace = backward_workspace.data(),
                              .workspace_bytes = backward_workspace.bytes()};
  experts.backward(backward);
  router_backward({.scoring = Scoring::kSoftmaxOverChosen,
                   .routing = &routing,
                   .ds = backward.ds,
                   .dlogits = {dlogits.data(), DType::kFloat32, {T, E}},
                   .workspace = routing_workspace.data(),
                   .workspace_bytes = routing_workspace.bytes()});

  // A step against the gradient of the experts' down-projection must lower the loss.
  const auto loss = [&] {
    double sum = 0;
    for (int64_t i = 0; i < T * d; ++i) sum += 0.5 * o.floats()[i] * o.floats()[i];
    return sum;
  };
  const double before = loss();
  for (int64_t i = 0; i < E * d * n; ++i) w2.floats()[i] -= 1e-4f * dw2.floats()[i];
  experts.forward(forward);
  const double after = loss();
  std::printf("kept for backward: %zu bytes (X %zu, H %zu, routing %zu)\n", saved_size.total,
              saved_size.rows, saved_size.H, saved_size.routing);
  std::printf("loss before a step on W2: %.4f, after: %.4f\n", before, after);
  return after < before ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return EXIT_FAILURE;
  }
}
