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
void start(Kernel kernel, const Step& step) {
  const auto place = static_cast<size_t>(kernel - instances::kIndex.tile.data());
  const instances::Start<Step> run = instances::kStarts<Step>[instances::kIndex.row.at(place)];
  TILEMOE_ASSERT(run, "row " << place << " of the kernels is of another step");
  run(step);
}

template void start(Kernel, const UpProjection&);
template void start(Kernel, const DownProjection&);
template void start(Kernel, const ActivationGradient&);
template void start(Kernel, const InputGradient&);
template void start(Kernel, const WeightGradient&);
template void start(Kernel, const LoraProjection&);

}  // namespace tilemoe::cuda
