// W1's rows as products see them, whatever the gate layout: for a range of A's columns, the parts
// of W1 that make H's columns. H itself always has gate columns first, then up columns.
#pragma once

#include <array>
#include <cstdint>

#include "backend.h"
#include "cpu/matrix.h"
#include "up_parts.h"

namespace tilemoe::cpu {

struct UpPart {
  Matrix weights;   // (columns, d); of a bias (columns, 1)
  int64_t half;     // 0: begins in H's gate columns (or H has no other), 1: in its up columns
  int64_t columns;  // twice those of the range where the part covers both halves
};

class UpParts {
 public:
  const UpPart* begin() const { return parts_.data(); }
  const UpPart* end() const { return parts_.data() + count_; }
  int64_t count() const { return static_cast<int64_t>(count_); }
  const UpPart& operator[](int64_t index) const { return parts_[static_cast<size_t>(index)]; }
  void push_back(const UpPart& part) { parts_[count_++] = part; }

 private:
  std::array<UpPart, 2> parts_;
  size_t count_ = 0;
};

// Of one expert, for A's columns [first, first + columns). `W` and `W_up` are W1 and W1_up, their
// gradients, or biases; a part whose tensor is absent is left out.
inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up, int64_t expert, int64_t first,
                        int64_t columns) {
  const bool gated = tilemoe_activation_gated(experts.activation) != 0;
  UpParts parts;
  if (gated && experts.gate_layout == TILEMOE_GATE_CONCATENATED && columns == experts.n) {
    if (W.ndim) parts.push_back({expert_matrix(W, expert), 0, 2 * columns});  // both at once
    return parts;
  }
  const tilemoe::UpParts all = tilemoe::up_parts(experts, W, W_up);
  for (int half = 0; half < all.count; ++half)
    if (all.part[half].ndim)
      parts.push_back({expert_matrix(all.part[half], expert).at(first, 0), half, columns});
  return parts;
}

}  // namespace tilemoe::cpu
