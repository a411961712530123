// Stands for what commands do on a GPU, in a build without the CUDA backend.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <string>

#include "cuda/doctor_gpu.h"

namespace tilemoe::app {
namespace {

[[noreturn]] void refuse() {
  throw std::runtime_error(
      "TileMoE was built without CUDA; install the CUDA wheel or rebuild with TILEMOE_CUDA=ON");
}

// The compiler where cmake/Cuda.cmake looks for it; empty if it is not found.
std::string find_nvcc() {
  const char* const path = std::getenv("PATH");
  std::istringstream folders(std::string(path ? path : "") + ":/usr/local/cuda/bin");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const std::string file = folder + "/nvcc"; access(file.c_str(), X_OK) == 0) return file;
  return "";
}

bool has_driver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver) dlclose(driver);
  return driver != nullptr;
}

}  // namespace

std::string what_the_build_lacks() {
  const std::string nvcc = find_nvcc();
  return "the CUDA build requires nvcc (" +
         (nvcc.empty() ? "not found on PATH or in /usr/local/cuda/bin" : "found: " + nvcc) +
         ") and, to run, an NVIDIA driver >= 580, or >= 525 for CUDA 12 (" +
         (has_driver() ? "found" : "not found: libcuda.so.1 cannot be loaded") + ")";
}

void use_gpu(int) {
  refuse();
}

}  // namespace tilemoe::app
