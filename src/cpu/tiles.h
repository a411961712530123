// How the steps cut their work, and the scratch that a worker needs for a piece. Everything here
// follows from the problem alone, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "backend.h"

namespace tilemoe::cpu {

// Rows of X, H and A that one task works on, at most: with the weights that meet them they stay in
// a core's second-level cache. With 128, products with W1^T and W2^T lose 5 % to packing the
// weights.
constexpr int64_t kTileRows = 256;
// Columns of A that one task of the up-projection or of the activation gradient makes; H has twice
// as many where there is a gate.
constexpr int64_t kInnerColumns = 256;
// Columns of Y and dX~ that one task makes.
constexpr int64_t kOuterColumns = 512;
// Rows and columns of a weight gradient that one task makes, at most.
constexpr int64_t kGradientTile = 512;
// Terms of a sum that are taken at once where an operand has to be gathered or converted first. In
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

}  // namespace tilemoe::cpu
