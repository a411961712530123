// Times of the forward steps on the device, for every tile that a step has: cold L2, medians.
// tilemoe_cuda_steps [config ...]
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/backend.h"
#include "cuda/schedule/configuration.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe {
namespace {

struct Config {
  const char* name;
  int64_t T, d, n, E, K;
};
constexpr Config kConfigs[] = {
    {"7b-n256", 24576, 1536, 256, 128, 8},    {"7b-n1024", 24576, 1536, 1024, 32, 2},
    {"30b-n256", 32768, 4096, 256, 256, 16},  {"30b-n1024", 32768, 4096, 1024, 64, 4},
    {"olmoe", 32768, 2048, 1024, 64, 8},      {"qwen3-235b", 32768, 4096, 1536, 128, 8},
    {"gpt-oss-20b", 32768, 2880, 2880, 32, 4}};

void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) { check_cuda(cudaMalloc(&data_, bytes)); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  void upload(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Copies of one random block of a prime number of elements.
  void fill(double scale) {
    constexpr size_t kElements = 4194301;
    static const std::vector<float> normals = [] {
      verify::Random random(1, 1);
      std::vector<float> values(kElements);
      for (float& v : values) v = static_cast<float>(random.normal());
      return values;
    }();
    std::vector<uint16_t> block(kElements);
    for (size_t i = 0; i < kElements; ++i)
      block[i] = verify::encode_16bit(DType::kBFloat16, scale * static_cast<double>(normals[i]));
    const size_t block_bytes = kElements * 2;
    check_cuda(
        cudaMemcpy(data_, block.data(), std::min(block_bytes, bytes_), cudaMemcpyHostToDevice));
    for (size_t have = block_bytes; have < bytes_; have *= 2)
      check_cuda(cudaMemcpy(static_cast<char*>(data_) + have, data_, std::min(have, bytes_ - have),
                            cudaMemcpyDeviceToDevice));
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

tilemoe_tensor tensor(const DeviceBuffer& buffer, std::vector<int64_t> shape) {
  tilemoe_tensor view{};
  view.data = buffer.data();
  view.dtype = TILEMOE_BFLOAT16;
  view.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= shape[i];
  }
  return view;
}

// K distinct experts a token, uniformly.
struct RandomRouting {
  std::vector<int32_t> offsets, tokens, pair_row;
  std::vector<float> scores;

  explicit RandomRouting(const Config& c) {
    verify::Random random(5, 5);
    std::vector<std::vector<int32_t>> pairs_of(static_cast<size_t>(c.E));
    std::vector<int32_t> ids(static_cast<size_t>(c.E));
    std::iota(ids.begin(), ids.end(), 0);
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t k = 0; k < c.K; ++k) {
        const auto slot = static_cast<size_t>(k);
        std::swap(ids[slot], ids[static_cast<size_t>(k + random.below(c.E - k))]);
        pairs_of[static_cast<size_t>(ids[slot])].push_back(static_cast<int32_t>(t * c.K + k));
      }
    pair_row.resize(static_cast<size_t>(c.T * c.K));
    offsets.push_back(0);
    for (const auto& pairs : pairs_of) {
      for (const int32_t pair : pairs) {
        pair_row[static_cast<size_t>(pair)] = static_cast<int32_t>(tokens.size());
        tokens.push_back(pair / static_cast<int32_t>(c.K));
        scores.push_back(1.f / static_cast<float>(c.K));
      }
      offsets.push_back(static_cast<int32_t>(tokens.size()));
    }
  }
};

// Milliseconds, the median; the cache is overwritten before each run.
template <class Run>
double median_ms(const DeviceBuffer& flush, const Run& run) {
  constexpr int kRuns = 15;
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    check_cuda(cudaMemsetAsync(flush.data(), i, flush.bytes()));
    check_cuda(cudaEventRecord(begin));
    run();
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]);
}

void report(const char* config, const char* step, const char* tile, double ms, double flop,
            double bytes) {
  const double limit = std::max(flop / 798e12, bytes / 3.0e12) * 1e3;
  std::printf("%-12s %-6s %-16s %8.4f ms %7.1f TFLOP/s %7.1f GB/s  limit %8.4f (%.2f)\n", config,
              step, tile, ms, flop / ms * 1e-9, bytes / ms * 1e-6, limit, limit / ms);
  std::fflush(stdout);
}

void bench(const Config& c) {
  const int64_t M = c.T * c.K;
  const auto elements = [](int64_t a, int64_t b) { return static_cast<size_t>(a * b * 2); };
  DeviceBuffer X(elements(c.T, c.d)), W1(elements(c.E * 2 * c.n, c.d)),
      W2(elements(c.E * c.d, c.n));
  DeviceBuffer H(elements(M, 2 * c.n)), A(elements(M, c.n)), Y(elements(M, c.d)),
      O(elements(c.T, c.d));
  DeviceBuffer flush(size_t{256} << 20);
  X.fill(0.2), W1.fill(0.02), W2.fill(0.02);
  const RandomRouting routing(c);
  DeviceBuffer offsets(routing.offsets.size() * 4), tokens(routing.tokens.size() * 4);
  DeviceBuffer pair_row(routing.pair_row.size() * 4), scores(routing.scores.size() * 4);
  offsets.upload(routing.offsets), tokens.upload(routing.tokens);
  pair_row.upload(routing.pair_row), scores.upload(routing.scores);

  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.device = TILEMOE_CUDA;
  experts.dtype = TILEMOE_BFLOAT16;
  experts.d = c.d, experts.n = c.n, experts.E = c.E;
  tilemoe_routing object{};
  object.spec.kind = TILEMOE_ROUTING_TOP_K;
  object.spec.T = c.T, object.spec.E = c.E, object.spec.K = c.K;
  object.spec.pairs = object.spec.capacity = M;
  object.offsets = static_cast<int32_t*>(offsets.data());
  object.pair_row = static_cast<int32_t*>(pair_row.data());
  object.row_score = static_cast<float*>(scores.data());
  const Rows rows{.E = c.E,
                  .capacity = M,
                  .offsets = object.offsets,
                  .token = static_cast<const int32_t*>(tokens.data()),
                  .score = nullptr};
  UpProjection up{};
  up.experts = &experts;
  up.rows = rows;
  up.X = tensor(X, {c.T, c.d});
  up.weights.W1 = tensor(W1, {c.E, 2 * c.n, c.d});
  up.H = tensor(H, {M, 2 * c.n});
  up.A = tensor(A, {M, c.n});
  DownProjection down{};
  down.experts = &experts;
  down.rows = rows;
  down.A = up.A;
  down.W2 = tensor(W2, {c.E, c.d, c.n});
  down.Y = tensor(Y, {M, c.d});
  Combine combine{};
  combine.experts = &experts;
  combine.routing = &object;
  combine.row_values = down.Y;
  combine.scale_by_score = true;
  combine.out = tensor(O, {c.T, c.d});
  Backend& backend = cuda::backend();
  const auto m = static_cast<double>(M), d = static_cast<double>(c.d), n = static_cast<double>(c.n);
  const auto E = static_cast<double>(c.E), T = static_cast<double>(c.T);
  const std::pair<const char*, std::optional<cuda::TileConfiguration>> tiles[] = {
      {"chosen", {}},
      {"cooperative256", cuda::kCooperative256},
      {"pingpong128", cuda::kPingPong128}};
  const double up_ms = median_ms(flush, [&] { backend.up_projection(up); });
  report(c.name, "up", "", up_ms, 4 * m * d * n, 2 * (T * d + E * 2 * n * d + 2 * m * n + m * n));
  for (const auto& [name, tile] : tiles) {
    cuda::force_tile(tile);
    const double down_ms = median_ms(flush, [&] { backend.down_projection(down); });
    report(c.name, "down", name, down_ms, 2 * m * d * n, 2 * (m * n + E * n * d + m * d));
  }
  cuda::force_tile({});
  const double combine_ms = median_ms(flush, [&] { backend.combine(combine); });
  report(c.name, "combine", "", combine_ms, 2 * m * d, 2 * (m * d + T * d));
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  try {
    std::printf("%s\n", tilemoe::cuda::backend().description().c_str());
    for (const tilemoe::Config& config : tilemoe::kConfigs) {
      const auto wanted = [&](const char* name) { return std::strcmp(name, config.name) == 0; };
      if (argc == 1 || std::any_of(argv + 1, argv + argc, wanted)) tilemoe::bench(config);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
