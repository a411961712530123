// How the steps cut their work into tasks, and the scratch of a worker. Everything here depends on
// the problem alone, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {

// Rows of X, H and A that one task works on, at most: they stay in the second-level cache of a
// core together with their weights. With 128, GEMMs with W1^T and W2^T lose 5 % to packing the
// weights.
constexpr int64_t kTileRows = 256;
// Columns of A that one task of the up-projection or of the activation gradient makes; H has twice
// as many with a gate.
constexpr int64_t kInnerColumns = 256;
// Columns of Y and dX~ that one task makes.
constexpr int64_t kOuterColumns = 512;
// Rows and columns of a weight gradient that one task makes, at most.
constexpr int64_t kGradientTile = 512;
// Terms of a sum that are taken at once if an operand has to be gathered or converted first. In
// weight gradients 512 would be 4 % slower.
constexpr int64_t kDepth = 256;

constexpr int64_t tile_count(int64_t size, int64_t tile) {
  return (size + tile - 1) / tile;
}

// One worker's part of a step's scratch.
struct WorkerScratch {
  float* tile;    // a task's output before it is rounded
  float* panels;  // operands, gathered or converted
};

class StepScratch {
 public:
  static size_t bytes(const tilemoe_experts& experts, int64_t capacity);
  StepScratch(const tilemoe_experts& experts, int64_t capacity, const Scratch& scratch);

  void* row_tiles() const { return row_tiles_; }
  WorkerScratch worker(int index) const;

 private:
  char* row_tiles_;
  char* workers_;
  size_t tile_bytes_, worker_bytes_;
};

// The rows of a batch cut into tiles that never cross from one expert to the next: the tasks of the
// steps whose output has a row per row. An expert's tiles are of equal height, give or take a row:
// a short last one would have all of the weights packed for a handful of rows.

struct RowTile {
  int64_t expert;
  int64_t first;  // row
  int64_t rows;   // at least 1
};

class RowTiles {
 public:
  static size_t bytes(int64_t experts) {
    return static_cast<size_t>(experts + 1) * sizeof(int64_t);
  }

  // Tiles have at most `height` rows. `memory` has bytes(rows.E) bytes and lives as long as this.
  RowTiles(const Rows& rows, int64_t height, void* memory)
      : rows_(rows), first_tile_(static_cast<int64_t*>(memory)) {
    first_tile_[0] = 0;
    for (int64_t e = 0; e < rows.E; ++e)
      first_tile_[e + 1] = first_tile_[e] + tile_count(rows_of(e), height);
  }

  int64_t count() const { return first_tile_[rows_.E]; }

  RowTile operator[](int64_t tile) const {
    const int64_t* next = std::upper_bound(first_tile_, first_tile_ + rows_.E + 1, tile);
    const int64_t expert = next - first_tile_ - 1;
    const int64_t index = tile - first_tile_[expert];
    const int64_t tiles = first_tile_[expert + 1] - first_tile_[expert];
    const int64_t begin = rows_of(expert) * index / tiles;
    const int64_t end = rows_of(expert) * (index + 1) / tiles;
    return {expert, rows_.offsets[expert] + begin, end - begin};
  }

 private:
  int64_t rows_of(int64_t expert) const {
    const int32_t* ends = rows_.ends != nullptr ? rows_.ends : rows_.offsets + 1;
    return ends[expert] - rows_.offsets[expert];
  }

  Rows rows_;
  int64_t* first_tile_;  // (E + 1)
};

// task(step, tile, first column, columns, the worker's scratch) for every tile of the step's rows
// by every `width` of the columns, on all threads.
template <class Step, class Task>
void for_each_tile(const Step& step, int64_t columns, int64_t width, const Task& task) {
  const StepScratch scratch(*step.experts, step.rows.capacity, step.scratch);
  const RowTiles tiles(step.rows, kTileRows, scratch.row_tiles());
  const int64_t column_tiles = tile_count(columns, width);
  parallel_for(tiles.count() * column_tiles, [&](int64_t number, int worker) {
    const int64_t first = number % column_tiles * width;
    task(step, tiles[number / column_tiles], first, std::min(width, columns - first),
         scratch.worker(worker));
  });
}

}  // namespace tilemoe::cpu
