#include "cuda/weight_codes.h"

#include <atomic>

#include "core/formats.h"
#include "cuda/plan.h"

namespace tilemoe::cuda {
namespace {

constexpr int64_t kNotSet = -1;
std::atomic<int64_t> set_max_rows{kNotSet};

bool has_rows_for_codes(tilemoe_format format, int64_t capacity, int64_t E) {
  const int64_t set = set_max_rows;
  if (set != kNotSet) return capacity <= set * E;
  return capacity >= E && capacity <= max_rows_of_codes(format) * E;
}

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

void set_max_rows_of_codes(std::optional<int64_t> rows) {
  set_max_rows = rows.value_or(kNotSet);
}

CodesRead codes_read(const CodesRequest& request) {
  const tilemoe_experts& experts = request.experts;
  const auto reads = [&](auto step, tilemoe_format format, int64_t columns, int32_t rank) {
    return has_rows_for_codes(format, request.capacity, experts.E) &&
           has_rows_for_copies(format, columns) && has_kernel(step, request, format, rank);
  };
  UpProjection up{};
  up.weights.W1 = request.weights.W1;
  DownProjection down{};
  down.W2 = request.weights.W2;
  return {.W1 = reads(up, experts.format_1, experts.d, experts.rank_1),
          .W2 = reads(down, experts.format_2, experts.n, experts.rank_2)};
}

}  // namespace tilemoe::cuda
