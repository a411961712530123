#include "bench_machine.h"

#include "bench_memory.h"
#include "bench_router.h"

namespace tilemoe::app {
namespace {

class CpuMachine final : public BenchMachine {
 public:
  verify::Memory& memory() const override { return verify::host_memory(); }
  size_t available_memory() const override { return app::available_memory(); }
  void fill_normal(DType dtype, void* to, int64_t elements, double scale,
                   uint64_t seed) const override {
    app::fill_normal(dtype, to, elements, scale, seed);
  }
  std::unique_ptr<RouterProducts> router(const verify::Case& layer, bool) const override {
    return std::make_unique<CpuRouter>(layer.T, layer.d, layer.E);
  }
};

}  // namespace

const BenchMachine& cpu_machine() {
  static const CpuMachine machine;
  return machine;
}

}  // namespace tilemoe::app
