// Helper of the registry's lists.
#pragma once

#include "case.h"

namespace tilemoe::verify {

// A named variation of a shape.
template <class Change>
Case vary(const char* name, Case shape, Change&& change) {
  shape.name = name;
  change(shape);
  return shape;
}

}  // namespace tilemoe::verify
