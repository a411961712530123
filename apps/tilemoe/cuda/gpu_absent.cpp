// Stands for what commands do on a GPU, in a build without the CUDA backend.
#include <stdexcept>

#include "cuda/bench_gpu.h"
#include "cuda/doctor_gpu.h"

namespace tilemoe::app {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error("this build has no CUDA backend: use the CPU backend");
}

}  // namespace

nlohmann::json bench_on_gpu(const GpuBench&) {
  refuse();
}
void use_gpu(int) {
  refuse();
}
DoctorGpu describe_gpu() {
  refuse();
}
cuda::VerdictKey verdict_key_of(int, const std::string&) {
  refuse();
}
DoctorTimes time_layer(verify::Case) {
  refuse();
}

}  // namespace tilemoe::app
