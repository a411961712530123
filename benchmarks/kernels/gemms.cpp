// The layers' GEMMs by cuBLASLt, as dense ones of all rows, and the rate of a large one.
#include <algorithm>
#include <utility>

#include "cuda/cublaslt.h"  // of apps/tilemoe
#include "modes.h"
#include "timed_layer.h"

namespace tilemoe::app {
namespace {

using verify::Case;

// A step and the GEMM that it computes: C (M, N) = A (M, K) B (K, N), row-major.
struct StepGemm {
  const char* step;
  DenseShape shape;
};

std::vector<StepGemm> steps_of(const Case& layer) {
  const int64_t M = layer.T * layer.K, d = layer.d, n = layer.n, h = layer.h_width();
  const auto gemm = [&](int64_t rows, int64_t columns, int64_t depth, bool A_transposed,
                        bool B_transposed) {
    return DenseShape{.M = rows,
                      .N = columns,
                      .K = depth,
                      .A_transposed = A_transposed,
                      .B_transposed = B_transposed,
                      .operands = layer.dtype,
                      .result = layer.dtype};
  };
  return {
      {step::up_projection, gemm(M, h, d, false, true)},         // X W1^T
      {step::down_projection, gemm(M, d, n, false, true)},       // A W2^T
      {step::activation_gradient, gemm(M, n, d, false, false)},  // dO W2
      {step::weight_gradient_2, gemm(d, n, M, true, false)},     // dO^T A'
      {step::input_gradient, gemm(M, d, h, false, false)},       // dH W1
      {step::weight_gradient_1, gemm(h, d, M, true, false)},     // dH^T X
  };
}

// Every operand and result has one dtype.
Work work_of(const DenseShape& shape) {
  const auto M = static_cast<double>(shape.M), N = static_cast<double>(shape.N),
             K = static_cast<double>(shape.K);
  return {2 * M * N * K, static_cast<double>(size_of(shape.operands)) * (M * K + K * N + M * N)};
}

// The fastest algorithm for each.
class DenseGemms {
 public:
  DenseGemms(std::vector<StepGemm> steps, DType dtype) : steps_(std::move(steps)) {
    int64_t A = 0, B = 0, C = 0;
    for (const auto& [step, shape] : steps_) {
      A = std::max(A, shape.M * shape.K), B = std::max(B, shape.K * shape.N);
      C = std::max(C, shape.M * shape.N);
    }
    A_ = DeviceBuffer(dtype, A), B_ = DeviceBuffer(dtype, B), C_ = DeviceBuffer(dtype, C);
    fill_normal(verify::cuda_memory(), Tensor(A_.data(), dtype, {A}), 0.2, 7);
    fill_normal(verify::cuda_memory(), Tensor(B_.data(), dtype, {B}), 0.02, 8);
    const DeviceCacheFlush flush;
    for (const StepGemm& one : steps_) {
      gemms_.push_back(std::make_unique<LtGemm>(one.shape));
      gemms_.back()->choose(A_.data(), B_.data(), C_.data(), flush);
    }
  }

  const std::vector<StepGemm>& steps() const { return steps_; }
  void run(size_t i) const { gemms_[i]->run(A_.data(), B_.data(), C_.data()); }

 private:
  std::vector<StepGemm> steps_;
  DeviceBuffer A_, B_, C_;
  std::vector<std::unique_ptr<LtGemm>> gemms_;
};

void time_layer(const Case& layer, Clock& clock, int rounds, Report& report) {
  const DenseGemms dense(steps_of(layer), layer.dtype);
  std::vector<std::function<void()>> runs;
  for (size_t i = 0; i < dense.steps().size(); ++i) runs.push_back([&, i] { dense.run(i); });
  const std::vector<Samples> ms = interleaved_ms(clock, runs, rounds);
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& [step, shape] = dense.steps()[i];
    report.add_times("gemm/" + layer.name + "/" + step, ms[i], {work_of(shape)},
                     {{"cublaslt", cublaslt_version()}});
  }
}

}  // namespace

Limits measured_limits() {
  constexpr int64_t kSize = 8192;
  constexpr size_t kCopied = size_t{1} << 30;
  constexpr int kRounds = 15;
  const DenseShape shape{.M = kSize, .N = kSize, .K = kSize};
  const DenseGemms dense({{"square", shape}}, shape.operands);
  const DeviceBuffer from(kCopied), to(kCopied);
  const auto copy = [&] {
    check_cuda(cudaMemcpyAsync(to.data(), from.data(), kCopied, cudaMemcpyDeviceToDevice),
               "cudaMemcpyAsync");
  };
  const std::unique_ptr<Clock> clock = make_clock(Device::kCuda);
  const std::vector<Samples> ms = interleaved_ms(*clock, {[&] { dense.run(0); }, copy}, kRounds);
  return {.flop_per_s = work_of(shape).flop / (median(ms[0]) * 1e-3),
          .bytes_per_s = 2.0 * kCopied / (median(ms[1]) * 1e-3)};
}

void time_gemms(const Request& request, Report& report) {
#ifdef TILEMOE_BARE_GEMMS
  time_bare_gemms(report);
#endif
  const std::unique_ptr<Clock> clock = make_clock(request.device);
  for (const Case& layer : request.layers) {
    time_layer(layer, *clock, request.rounds, report);
    report.print(layer.name + ", dense GEMMs by cuBLASLt " + cublaslt_version() + ": " +
                 shape_text(layer) + ", " + report.device());
  }
}

}  // namespace tilemoe::app
