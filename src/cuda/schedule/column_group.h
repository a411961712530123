// How many blocks of columns share rows while they are in L2; see RowTiles and ExpertTiles.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

constexpr int32_t kColumnGroup = 8;

inline int32_t column_group(const Tuning& tuning) {
  return tuning.column_group != 0 ? tuning.column_group : kColumnGroup;
}

}  // namespace tilemoe::cuda
