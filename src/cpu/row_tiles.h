// The rows of a batch cut into tiles that never cross from one expert to the next: the tasks of the
// steps whose output has a row per row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backend.h"

namespace tilemoe::cpu {

struct RowTile {
  int64_t expert;
  int64_t first;  // row
  int64_t rows;   // 1 to the height
};

class RowTiles {
 public:
  static size_t bytes(int64_t experts) {
    return static_cast<size_t>(experts + 1) * sizeof(int64_t);
  }

  // `memory` has bytes(rows.E) bytes and lives as long as this.
  RowTiles(const Rows& rows, int64_t height, void* memory)
      : rows_(rows), height_(height), first_tile_(static_cast<int64_t*>(memory)) {
    first_tile_[0] = 0;
    for (int64_t e = 0; e < rows.E; ++e) {
      const int64_t expert_rows = rows.offsets[e + 1] - rows.offsets[e];
      first_tile_[e + 1] = first_tile_[e] + (expert_rows + height - 1) / height;
    }
  }

  int64_t count() const { return first_tile_[rows_.E]; }

  RowTile operator[](int64_t tile) const {
    const int64_t* next = std::upper_bound(first_tile_, first_tile_ + rows_.E + 1, tile);
    const int64_t expert = next - first_tile_ - 1;
    const int64_t first = rows_.offsets[expert] + (tile - first_tile_[expert]) * height_;
    return {expert, first, std::min<int64_t>(height_, rows_.offsets[expert + 1] - first)};
  }

 private:
  Rows rows_;
  int64_t height_;
  int64_t* first_tile_;  // (E + 1)
};

}  // namespace tilemoe::cpu
