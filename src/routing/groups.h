// Group-limited choice: a token chooses only among the experts of its best groups. The score of a
// group and the order of groups have the same bits on host and device.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "routing/order.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

constexpr int kMaxGroups = 32;  // a bit each, and a lane of a warp

namespace order {

// The two best of a group's numbers; a NaN counts as -inf.
class TopTwo {
 public:
  TILEMOE_HOST_DEVICE void add(float x) {
    x = greater(x, kNone);
    second_ = greater(second_, lesser(best_, x));
    best_ = greater(best_, x);
  }
  TILEMOE_HOST_DEVICE void add(const TopTwo& other) {
    second_ = greater(lesser(best_, other.best_), greater(second_, other.second_));
    best_ = greater(best_, other.best_);
  }
  // The key that the group is ranked by.
  TILEMOE_HOST_DEVICE int32_t key_of(tilemoe_group_score score) const {
    return key(score == TILEMOE_GROUP_MAX ? best_ : best_ + second_);
  }

  TILEMOE_HOST_DEVICE float best() const { return best_; }
  TILEMOE_HOST_DEVICE float second() const { return second_; }
  TILEMOE_HOST_DEVICE TopTwo(float best, float second) : best_(best), second_(second) {}
  TILEMOE_HOST_DEVICE TopTwo() : TopTwo(kNone, kNone) {}

 private:
  static constexpr float kNone = -__builtin_huge_valf();

  // If `a` is a NaN and `b` a number, the number; of two zeros either one, since their keys are
  // equal.
  TILEMOE_HOST_DEVICE static float greater(float a, float b) {
#if defined(__CUDA_ARCH__)
    return fmaxf(a, b);
#else
    return a > b ? a : b;
#endif
  }
  TILEMOE_HOST_DEVICE static float lesser(float a, float b) {
#if defined(__CUDA_ARCH__)
    return fminf(a, b);
#else
    return a < b ? a : b;
#endif
  }

  float best_, second_;
};

// Whether a group of `key` precedes another; of equal keys the lower group comes first.
TILEMOE_HOST_DEVICE bool group_before(int32_t key, int32_t group, int32_t other_key,
                                      int32_t other) {
  return key > other_key || (key == other_key && group < other);
}

}  // namespace order
}  // namespace tilemoe
