// Stands for what tilemoe_kernels does on a GPU, in a build without the CUDA backend.
#include <stdexcept>

#include "modes.h"

namespace tilemoe::app {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON");
}

}  // namespace

std::unique_ptr<Clock> make_cuda_clock() {
  refuse();
}
std::string cuda_device_name() {
  refuse();
}
void add_cuda_versions(Values&) {}
bool compare_configurations(const Request&, Report&) {
  refuse();
}
void time_codes(const Request&, Report&) {
  refuse();
}
void time_gemms(const Request&, Report&) {
  refuse();
}
Limits measured_limits() {
  refuse();
}

}  // namespace tilemoe::app
