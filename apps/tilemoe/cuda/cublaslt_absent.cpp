// Stands for cuBLASLt in a build whose CUDA toolkit has no header of it.
#include <stdexcept>

#include "cuda/cublaslt.h"

namespace tilemoe::app {
namespace {

[[noreturn]] void absent() {
  throw std::runtime_error(
      "this program was built without cublasLt.h: dense products on a GPU are taken from cuBLASLt");
}

}  // namespace

struct LtProduct::State {};

LtProduct::LtProduct(const DenseShape&) {
  absent();
}
LtProduct::~LtProduct() = default;
void LtProduct::choose(const void*, const void*, void*, const DeviceCacheFlush&) {
  absent();
}
void LtProduct::run(const void*, const void*, void*) {
  absent();
}
std::string cublaslt_version() {
  absent();
}

}  // namespace tilemoe::app
