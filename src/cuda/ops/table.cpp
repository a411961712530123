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
#define PRODUCT(STEP, UNIT, KIT, TILE, ...) \
  TILEMOE_ROW_OF_##KIT(                     \
      only<Step, STEP>(static_cast<Start<STEP>>(&run<KIT, Variant{__VA_ARGS__}, TILE>)), )
#include "cuda/ops/kernels.inc"
#undef PRODUCT
};

}  // namespace
}  // namespace instances

template <class Step>
void start(const ProductKey& key, const TileConfiguration& tile, const Step& step) {
  for (size_t i = 0; i < std::size(instances::kRows); ++i) {
    const instances::Row& row = instances::kRows[i];
    if (row.tile == tile && row.key == key) return instances::kStarts<Step>[i](step);
  }
  TILEMOE_ASSERT(false, "no kernel of " << tile.block_m << " by " << tile.block_n << " for product "
                                        << static_cast<int>(key.product));
}

template void start(const ProductKey&, const TileConfiguration&, const UpProjection&);
template void start(const ProductKey&, const TileConfiguration&, const DownProjection&);
template void start(const ProductKey&, const TileConfiguration&, const ActivationGradient&);
template void start(const ProductKey&, const TileConfiguration&, const InputGradient&);
template void start(const ProductKey&, const TileConfiguration&, const WeightGradient&);

}  // namespace tilemoe::cuda
