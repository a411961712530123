// Plain SwiGLU in bfloat16. Rows that are sorted already, those of the grouped entry, come by TMA.
#include "cuda/step/projection_tiles.h"
#include "cuda/step/steps.h"
#include "cuda/step/up_projection.h"

namespace tilemoe::cuda {

template <class Shape>
void run_swiglu(const UpProjection& step) {
  if (step.rows.token != nullptr)
    run_up_projection<Shape, Activations::kSwiGLU, Major::kK>(step);
  else
    run_up_projection<Shape, Activations::kSwiGLU, Major::kK, DenseRows<Shape>>(step);
}

// One tile. Ping-pong with 128x192 and 128x128 was 13 and 40 % slower on 7b-n256, 3 and 43 % on
// qwen3-235b: the smaller tiles load more for each product than the hidden epilogue saves; with W1
// shared by two blocks still 9 and 13, 9 and 25 %.
void up_projection_swiglu(const UpProjection& step) {
  if (tile_of(step) == kCooperative256Cluster)
    run_swiglu<ClusterTile<__nv_bfloat16>>(step);
  else
    run_swiglu<AnyTile<__nv_bfloat16>>(step);
}

}  // namespace tilemoe::cuda
