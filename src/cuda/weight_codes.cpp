#include "cuda/weight_codes.h"

#include <atomic>

#include "core/formats.h"
#include "cuda/plan.h"

namespace tilemoe::cuda {
namespace {

std::atomic<int64_t> max_rows{kMaxRowsOfCodes};

// Rows of codes begin on 16 bytes, and those of NF4 at a block of scales.
bool has_rows_for_copies(tilemoe_format format, int64_t columns) {
  switch (format) {
    case TILEMOE_FORMAT_NONE: return false;
    case TILEMOE_FORMAT_FP8: return columns % 16 == 0;
    case TILEMOE_FORMAT_NF4:
    case TILEMOE_FORMAT_NF4_DOUBLE: return columns % kNf4Block == 0;
    case TILEMOE_FORMAT_MXFP4:
    case TILEMOE_FORMAT_NVFP4: return columns % 32 == 0;
  }
  return false;
}

template <class Step>
bool has_kernel(Step step, const CodesRequest& request, tilemoe_format format, int32_t rank) {
  step.experts = &request.experts;
  step.tuning.plan = request.plan;
  step.adapter.rows.ndim = rank > 0 ? 2 : 0;
  step.codes.weight.format = format;
  return !tiles_of(key_of(step)).empty();
}

}  // namespace

void set_max_rows_of_codes(int64_t rows) {
  max_rows = rows;
}

CodesRead codes_read(const CodesRequest& request) {
  const tilemoe_experts& experts = request.experts;
  if (request.capacity > max_rows * experts.E) return {};
  UpProjection up{};
  up.weights.W1 = request.weights.W1;
  DownProjection down{};
  down.W2 = request.weights.W2;
  return {.W1 = has_rows_for_copies(experts.format_1, experts.d) &&
                has_kernel(up, request, experts.format_1, experts.rank_1),
          .W2 = has_rows_for_copies(experts.format_2, experts.n) &&
                has_kernel(down, request, experts.format_2, experts.rank_2)};
}

}  // namespace tilemoe::cuda
