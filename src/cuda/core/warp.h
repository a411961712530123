// The unit that all GPUs of today have in common.
#pragma once

namespace tilemoe::cuda {

constexpr int kWarp = 32;  // threads

}  // namespace tilemoe::cuda
