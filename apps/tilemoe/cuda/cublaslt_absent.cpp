// Stands for cuBLASLt in a build whose CUDA toolkit has no header of it.
#include <stdexcept>

#include "cuda/cublaslt.h"

namespace tilemoe::app {
namespace {

[[noreturn]] void absent() {
  throw std::runtime_error(
      "this program was built without cublasLt.h, which dense GEMMs on a GPU require");
}

}  // namespace

struct LtGemm::State {};

LtGemm::LtGemm(const DenseShape&) {
  absent();
}
LtGemm::~LtGemm() = default;
void LtGemm::choose(const void*, const void*, void*, const DeviceCacheFlush&) {
  absent();
}
void LtGemm::run(const void*, const void*, void*) {
  absent();
}
std::string cublaslt_version() {
  absent();
}

}  // namespace tilemoe::app
