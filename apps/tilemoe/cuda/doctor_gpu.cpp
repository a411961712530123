#include "cuda/doctor_gpu.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "../device.h"  // "device.h" would find the one of this folder
#include "bench_steps.h"
#include "cuda/bench_gpu_measure.h"
#include "cuda/core/device.h"
#include "cuda/cublaslt.h"
#include "cuda/device_verdict.h"
#include "cuda/gpu_machine.h"
#include "table.h"

namespace tilemoe::app {
namespace {

constexpr int kRounds = 9;
constexpr int64_t kLeastTokens = 1024;

// Of the layer, its dense products' operands and what flushes the cache.
size_t needed_bytes(const verify::Case& layer) {
  const int64_t rows = layer.T * layer.K;
  int64_t A = 0, B = 0, C = 0;
  for (const DenseProduct& product : dense_products(layer, rows)) {
    A = std::max(A, product.rows * product.depth);
    B = std::max(B, product.depth * product.columns);
    C = std::max(C, product.rows * product.columns);
  }
  return BenchLayer::measure(layer, Device::kCuda).peak +
         size_of(layer.dtype) * static_cast<size_t>(A + B + C) + (size_t{512} << 20);
}

std::string why_no_dense_products() {
  try {
    cublaslt_version();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

void measure(const verify::Case& layer, DoctorTimes& times) {
  GpuMeasurement measurement(layer, {}, true);
  for (int round = 0; round < kRounds; ++round) measurement.run_round();
  for (int round = 0; round < kRounds; ++round) measurement.run_step_round();
  times.forward = median_of(measurement.rounds(), [](const GpuRound& r) { return r.forward; });
  times.backward = median_of(measurement.rounds(), [](const GpuRound& r) { return r.backward; });
  for (size_t i = 0; i < measurement.products().size(); ++i)
    times.dense +=
        median_of(measurement.step_rounds(), [&](const StepRound& r) { return r.dense[i]; });
}

}  // namespace

void use_gpu(int index) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  if (index < 0 || index >= count)
    throw std::runtime_error("--device cuda:" + std::to_string(index) + ": there are " +
                             std::to_string(count) + " GPUs here, the first is cuda:0");
  check_cuda(cudaSetDevice(index), "cudaSetDevice");
}

DoctorGpu describe_gpu() {
  int index = 0;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  DoctorGpu gpu{
      .name = properties.name,
      .capability = std::to_string(properties.major) + "." + std::to_string(properties.minor),
      .multiprocessors = properties.multiProcessorCount,
      .shared_bytes = properties.sharedMemPerBlockOptin,
      .driver = {},
      .driver_cuda = driver_version(),
      .runtime = runtime_version()};
  check_cuda(cudaMemGetInfo(&gpu.free_bytes, &gpu.total_bytes), "cudaMemGetInfo");
  std::ostringstream said;
  said << std::ifstream("/proc/driver/nvidia/version").rdbuf();
  gpu.driver = cuda::driver_release(said.str());
  return gpu;
}

std::string what_the_build_lacks() {
  return "";
}

cuda::VerdictKey verdict_key_of(int index, const std::string& kit) {
  try {
    return cuda::verdict_key(cuda::device_at(index), kit);
  } catch (const Error& error) {
    throw std::runtime_error(in_words(std::string("device_at: ") + error.what()));
  }
}

DoctorTimes time_layer(verify::Case layer) {
  const int64_t all_tokens = layer.T;
  DoctorTimes times{.layer = layer.name, .d = layer.d, .n = layer.n, .E = layer.E, .K = layer.K};
  try {
    const size_t available = gpu_machine().available_memory();
    while (layer.T / 2 >= kLeastTokens && needed_bytes(layer) > available) layer.T /= 2;
    times.T = layer.T, times.fewer_tokens = layer.T < all_tokens;
    const size_t needed = needed_bytes(layer);
    if (needed > available)
      times.skipped = "it needs " + bytes(static_cast<double>(needed)) + " of memory, " +
                      bytes(static_cast<double>(available)) + " are free";
    else if (const std::string why = why_no_dense_products(); !why.empty())
      times.skipped = why;
    else
      measure(layer, times);
  } catch (const std::exception& error) {
    times.failed = error.what();
  }
  return times;
}

}  // namespace tilemoe::app
