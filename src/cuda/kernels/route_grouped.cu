// A routing of rows that are sorted by expert already, from how many each expert has.
#include <algorithm>

#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 1024;

// One block. What passes the capacity is cut off, from the last expert on.
__global__ void __launch_bounds__(kThreads)
    sum_counts(const IntegerArray counts, int64_t E, int64_t capacity, int32_t* offsets,
               int32_t* counters) {
  using Scan = BlockScan<int64_t, Add, kThreads>;
  __shared__ typename Scan::Shared shared;
  int64_t rows = 0;
  for (int64_t base = 0; base < E; base += kThreads) {
    const int64_t e = base + threadIdx.x;
    // Past 2^32 a count is beyond every capacity, and the sum of any E stays a number.
    const int64_t count = e < E ? min(max(counts.at(e), int64_t{0}), int64_t{1} << 32) : int64_t{0};
    const auto sum = Scan::scan(shared, count);
    if (e < E) offsets[e + 1] = static_cast<int32_t>(min(rows + sum.inclusive, capacity));
    rows += sum.total;
  }
  if (threadIdx.x != 0) return;
  offsets[0] = 0;
  for (int i = 0; i < TILEMOE_COUNTERS; ++i) counters[i] = 0;
  const int64_t over = rows - min(rows, capacity);
  counters[TILEMOE_COUNT_OVER_CAPACITY] = static_cast<int32_t>(min(over, int64_t{INT32_MAX}));
}

// scores (capacity), null: every s is 1. Rows past the sum are neither read nor written.
__global__ void __launch_bounds__(kThreads)
    fill_scores(const float* scores, const int32_t* sum, float* row_score) {
  const int64_t rows = *sum;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; r < rows; r += stride)
    row_score[r] = scores == nullptr ? 1.f : scores[r];
}

}  // namespace

void route_grouped(const tilemoe_routing& routing, const tilemoe_route_grouped_args& args) {
  const int64_t E = routing.spec.E, capacity = routing.spec.capacity;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  launch_kernel("sum of counts", {.blocks = 1, .threads = kThreads, .stream = stream}, sum_counts,
                integer_array(args.counts), E, capacity, routing.offsets, routing.counters);
  if (capacity == 0) return;
  const int64_t blocks =
      std::min<int64_t>((capacity + kThreads - 1) / kThreads, current_device().sms * 2);
  launch_kernel("scores of rows",
                {.blocks = static_cast<unsigned>(blocks), .threads = kThreads, .stream = stream},
                fill_scores, static_cast<const float*>(args.scores.data), routing.offsets + E,
                routing.row_score);
}

}  // namespace tilemoe::cuda
