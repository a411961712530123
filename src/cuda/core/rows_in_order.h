// Which products may bring weights before the kernel before them in the stream has ended.
//
// A kernel that is started early begins when every block of the one before has waited for its own
// predecessor. So what older kernels wrote is there: the offsets of experts' rows, from which a
// block's tiles follow, and the weights. Where operand A's rows are those of the tile itself, they
// alone are the result of the kernel before; a gather's tokens may be too.
#pragma once

namespace tilemoe::cuda {

template <class LoadA>
inline constexpr bool rows_in_order = requires {
  requires LoadA::kInOrder;
};

}  // namespace tilemoe::cuda
