#include "cuda/ops/table.h"

#include <type_traits>

#include "core/check.h"

namespace tilemoe::cuda {
namespace instances {
namespace {

template <class Step>
using Start = void (*)(const Step&);

// Of another step's row, nothing.
template <class Step, class Other>
constexpr Start<Step> only(Start<Other> start) {
  if constexpr (std::is_same_v<Step, Other>)
    return start;
  else
    return nullptr;
}

template <class Step>
constexpr Start<Step> kStarts[] = {
#define KERNEL(STEP, UNIT, ARCH, TILE, ...) \
  TILEMOE_ROW_OF_##ARCH(                    \
      only<Step, STEP>(static_cast<Start<STEP>>(&run<ARCH, Variant{__VA_ARGS__}, TILE>)), )
#include "cuda/ops/kernels.inc"
#undef KERNEL
};

}  // namespace
}  // namespace instances

template <class Step>
void start(const KernelKey& key, const TileConfiguration& tile, const Step& step) {
  for (size_t i = 0; i < std::size(instances::kRows); ++i) {
    const instances::Row& row = instances::kRows[i];
    if (row.tile == tile && row.key == key) return instances::kStarts<Step>[i](step);
  }
  TILEMOE_ASSERT(false, "no kernel of " << tile.block_m << " by " << tile.block_n << " for product "
                                        << static_cast<int>(key.gemm));
}

template void start(const KernelKey&, const TileConfiguration&, const UpProjection&);
template void start(const KernelKey&, const TileConfiguration&, const DownProjection&);
template void start(const KernelKey&, const TileConfiguration&, const ActivationGradient&);
template void start(const KernelKey&, const TileConfiguration&, const InputGradient&);
template void start(const KernelKey&, const TileConfiguration&, const WeightGradient&);

}  // namespace tilemoe::cuda
