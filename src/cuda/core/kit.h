// The kits: what a GPU generation's products are made of. A kit is a struct with the parts that the
// steps name (sm90/kit.h shows what there is to be).
#pragma once

namespace tilemoe::cuda {

enum class KitName { kSm80, kSm90, kSm100 };

struct Sm80;   // from Ampere on: mma.sync, cp.async
struct Sm90;   // Hopper: wgmma, TMA, clusters
struct Sm100;  // Blackwell 10.x: tcgen05, tensor memory, TMA

}  // namespace tilemoe::cuda
