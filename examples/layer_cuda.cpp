// One Mixture-of-Experts layer, forward and backward, on a GPU: all work is queued on one stream, and
// the host waits for it once, at the end. The results are compared with those of the CPU backend.
// Built by the project as `example_layer_cuda`; outside it, find_package(TileMoE), and link
// TileMoE::tilemoe and CUDA's runtime.
#include <cuda_runtime_api.h>
#include <tilemoe/layer.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>

namespace {

using tilemoe::Device;
using tilemoe::DType;

constexpr int64_t T = 2048, d = 512, n = 256, E = 16, K = 2;
constexpr double kLimit = 2e-2;  // two ways to round to bfloat16 differ by less than 1e-2

void require(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Memory of one device. On a GPU it is allocated and freed in the stream's order, so work that is
// still queued may use it after its owner has gone.
class Memory {
 public:
  Memory(Device device, size_t bytes, cudaStream_t stream)
      : device_(device), bytes_(bytes), stream_(stream) {
    const size_t size = (bytes / 256 + 1) * 256;  // never empty
    if (device == Device::kCuda)
      require(cudaMallocAsync(&data_, size, stream));
    else
      data_ = std::aligned_alloc(256, size);
    if (data_ == nullptr) throw std::bad_alloc();
  }
  ~Memory() {
    if (device_ == Device::kCuda)
      cudaFreeAsync(data_, stream_);
    else
      std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  void copy_from(const void* host) const { copy(data_, host); }
  void copy_to(void* host) const { copy(host, data_); }

 private:
  void copy(void* to, const void* from) const {
    if (device_ == Device::kCuda)
      require(cudaMemcpyAsync(to, from, bytes_, cudaMemcpyDefault, stream_));
    else
      std::memcpy(to, from, bytes_);
  }

  Device device_;
  size_t bytes_;
  cudaStream_t stream_;
  void* data_ = nullptr;
};

// An array in pinned host memory: a copy from or to pageable memory would make the host wait.
template <class Element>
class HostArray {
 public:
  explicit HostArray(int64_t size) : size_(static_cast<size_t>(size)) {
    void* memory = nullptr;
    require(cudaMallocHost(&memory, bytes()));
    elements_ = static_cast<Element*>(memory);
  }
  ~HostArray() { cudaFreeHost(elements_); }
  HostArray(const HostArray&) = delete;
  HostArray& operator=(const HostArray&) = delete;

  size_t size() const { return size_; }
  size_t bytes() const { return size_ * sizeof(Element); }
  Element* data() const { return elements_; }
  Element& operator[](size_t i) const { return elements_[i]; }

 private:
  size_t size_;
  Element* elements_ = nullptr;
};

// A bfloat16 is the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};
BFloat16 to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits += 0x7fff + (bits >> 16 & 1);  // to the nearest, ties to even
  return {static_cast<uint16_t>(bits >> 16)};
}
double to_double(BFloat16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
double to_double(float value) {
  return value;
}

struct Inputs {
  HostArray<BFloat16> X{T * d}, dO{T * d};
  HostArray<BFloat16> W1{E * 2 * n * d};  // (E, 2n, d): gate rows, then up rows
  HostArray<BFloat16> W2{E * d * n};      // (E, d, n)
  HostArray<float> logits{T * E};

  Inputs() {
    std::mt19937 generator(1);
    const auto fill = [&](const HostArray<BFloat16>& array, float deviation) {
      std::normal_distribution<float> normal(0, deviation);
      for (size_t i = 0; i < array.size(); ++i) array[i] = to_bfloat16(normal(generator));
    };
    fill(X, 1);
    fill(dO, 1);
    fill(W1, 1 / std::sqrt(static_cast<float>(d)));
    fill(W2, 1 / std::sqrt(static_cast<float>(n)));
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < logits.size(); ++i) logits[i] = normal(generator);
  }
};

struct Outputs {
  HostArray<BFloat16> O{T * d}, dX{T * d}, dW1{E * 2 * n * d}, dW2{E * d * n};
  HostArray<float> dlogits{T * E};
};

// The layer on one device. On a GPU it returns as soon as all is queued on `stream`, which the
// outputs are ready after; on the CPU, `stream` is not used.
void run_layer(Device device, const Inputs& inputs, const Outputs& outputs, cudaStream_t stream) {
  using namespace tilemoe;
  const auto memory = [&](size_t bytes) { return Memory(device, bytes, stream); };

  // Sizes follow from the shapes alone.
  const RoutingSpec spec = RoutingSpec::top_k(device, T, E, K);
  const Experts experts{.device = device, .dtype = DType::kBFloat16, .d = d, .n = n, .E = E};

  const Memory logits = memory(inputs.logits.bytes()), X = memory(inputs.X.bytes());
  const Memory W1 = memory(inputs.W1.bytes()), W2 = memory(inputs.W2.bytes());
  const Memory dO = memory(inputs.dO.bytes());
  logits.copy_from(inputs.logits.data());
  X.copy_from(inputs.X.data());
  W1.copy_from(inputs.W1.data());
  W2.copy_from(inputs.W2.data());
  dO.copy_from(inputs.dO.data());

  // The K experts of each token and their scores, then the rows of each expert.
  const Memory ids = memory(T * K * sizeof(int32_t)), scores = memory(T * K * sizeof(float));
  const Memory routing_memory = memory(spec.bytes());
  const Memory routing_workspace = memory(spec.workspace_bytes());
  const Tensor ids_view(ids.data(), DType::kInt32, {T, K});
  const Tensor scores_view(scores.data(), DType::kFloat32, {T, K});
  top_k({.device = device,
         .scoring = Scoring::kSoftmaxOverChosen,
         .K = K,
         .logits = {logits.data(), DType::kFloat32, {T, E}},
         .ids = ids_view,
         .scores = scores_view,
         .stream = stream});
  Routing routing(spec, routing_memory.data(), routing_memory.bytes());
  routing.from_top_k(ids_view, scores_view, routing_workspace.data(), routing_workspace.bytes(),
                     stream);

  const Memory H = memory(experts.saved_bytes(spec).H), O = memory(outputs.O.bytes());
  Saved saved(Tensor(H.data(), DType::kBFloat16, {routing.capacity(), experts.h_width()}));
  const Memory forward_workspace = memory(experts.workspace_bytes(spec, Pass::kForward));
  const ForwardArgs forward{.routing = &routing,
                            .weights = {.W1 = {W1.data(), DType::kBFloat16, {E, 2 * n, d}},
                                        .W2 = {W2.data(), DType::kBFloat16, {E, d, n}}},
                            .X = {X.data(), DType::kBFloat16, {T, d}},
                            .O = {O.data(), DType::kBFloat16, {T, d}},
                            .saved = &saved,
                            .workspace = forward_workspace.data(),
                            .workspace_bytes = forward_workspace.bytes(),
                            .stream = stream};
  experts.forward(forward);

  const Memory dX = memory(outputs.dX.bytes()), ds = memory(T * K * sizeof(float));
  const Memory dW1 = memory(outputs.dW1.bytes()), dW2 = memory(outputs.dW2.bytes());
  const Memory backward_workspace = memory(experts.workspace_bytes(spec, BackwardMode::kWhole));
  const BackwardArgs backward{.routing = &routing,
                              .weights = forward.weights,
                              .X = forward.X,
                              .dO = {dO.data(), DType::kBFloat16, {T, d}},
                              .saved = &saved,
                              .dX = {dX.data(), DType::kBFloat16, {T, d}},
                              .dweights = {.W1 = {dW1.data(), DType::kBFloat16, {E, 2 * n, d}},
                                           .W2 = {dW2.data(), DType::kBFloat16, {E, d, n}}},
                              .ds = {ds.data(), DType::kFloat32, {T, K}},
                              .workspace = backward_workspace.data(),
                              .workspace_bytes = backward_workspace.bytes(),
                              .stream = stream};
  experts.backward(backward);
  const Memory dlogits = memory(outputs.dlogits.bytes());
  router_backward({.scoring = Scoring::kSoftmaxOverChosen,
                   .routing = &routing,
                   .ds = backward.ds,
                   .dlogits = {dlogits.data(), DType::kFloat32, {T, E}},
                   .workspace = routing_workspace.data(),
                   .workspace_bytes = routing_workspace.bytes(),
                   .stream = stream});

  O.copy_to(outputs.O.data());
  dX.copy_to(outputs.dX.data());
  dW1.copy_to(outputs.dW1.data());
  dW2.copy_to(outputs.dW2.data());
  dlogits.copy_to(outputs.dlogits.data());
}

// Whether `found` is `expected` within kLimit, by the norm of the difference.
template <class Element>
bool equal(const char* name, const HostArray<Element>& found, const HostArray<Element>& expected) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double wanted = to_double(expected[i]), error = to_double(found[i]) - wanted;
    difference += error * error;
    norm += wanted * wanted;
  }
  const double relative = std::sqrt(difference / norm);
  std::printf("%-8s differs by %.2e from the CPU's\n", name, relative);
  return norm > 0 && relative <= kLimit;  // a NaN is not
}

int run() {
  if (tilemoe_device_available(TILEMOE_CUDA) == 0)
    throw std::runtime_error(std::string("no GPU that this build runs on: ") +
                             tilemoe_last_error());
  std::printf("%s\n", tilemoe_device_description(TILEMOE_CUDA));
  const Inputs inputs;
  const Outputs of_gpu, of_cpu;
  cudaStream_t stream;
  require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  run_layer(Device::kCuda, inputs, of_gpu, stream);
  run_layer(Device::kCpu, inputs, of_cpu, nullptr);  // while the GPU works
  require(cudaStreamSynchronize(stream));
  require(cudaStreamDestroy(stream));

  bool right = equal("O", of_gpu.O, of_cpu.O);
  right &= equal("dX", of_gpu.dX, of_cpu.dX);
  right &= equal("dW1", of_gpu.dW1, of_cpu.dW1);
  right &= equal("dW2", of_gpu.dW2, of_cpu.dW2);
  right &= equal("dlogits", of_gpu.dlogits, of_cpu.dlogits);
  return right ? EXIT_SUCCESS : EXIT_FAILURE;
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
