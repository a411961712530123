// A pass divided into parts of its tokens (tilemoe_part), whose rows are looked up in the routing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "memory.h"
#include "tilemoe/routing.h"

namespace tilemoe::verify {

class Parts {
 public:
  // Part p has the tokens [cuts[p], cuts[p + 1]).
  Parts(const Routing& routing, const std::vector<int64_t>& cuts, Memory& memory);

  // The parts; the last one ends a backward.
  std::vector<tilemoe_part> in_order(std::initializer_list<size_t> order) const;

 private:
  GuardedBuffer bounds_;  // (cuts, E) int32
  std::vector<tilemoe_part> parts_;
};

}  // namespace tilemoe::verify
