// How the steps cut their work, and the scratch that a worker needs for a piece. Everything here
// follows from the problem alone, so results do not depend on the number of threads.
#pragma once

#include <cstdint>

#include "backend.h"

namespace tilemoe::cpu {

// A tile of 128 rows of X, H and A and the weights that meet it stay in a core's second-level
// cache.
constexpr int64_t kTileRows = 128;
// Columns of A that one task of the up-projection or of the activation gradient makes; H has twice
// as many where there is a gate. A column tile of ds.
constexpr int64_t kInnerColumns = 256;
// Columns of Y and dX~ that one task makes.
constexpr int64_t kOuterColumns = 512;
// A weight gradient's tile: columns of H or A by columns of X or dO.
constexpr int64_t kGradientInner = 512;
constexpr int64_t kGradientOuter = 256;
// Terms of a sum that are taken at once where an operand has to be gathered or converted first.
constexpr int64_t kDepth = 512;

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
