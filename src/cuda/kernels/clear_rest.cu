// Zeros in the rows that no expert has.
#include <algorithm>
#include <cstdint>

#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;

// M is on the device, and is the capacity in most calls: a CTA per SM reads M and has nothing to do.
__global__ void __launch_bounds__(kThreads)
    clear_from(const int32_t* M, int64_t capacity, int64_t row_vectors, uint4* out) {
  const int64_t end = capacity * row_vectors, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = *M * row_vectors + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end;
       i += step)
    out[i] = uint4{};
}

}  // namespace

// Launched without PDL: the GEMM before it may still read these rows.
void clear_rest(const Rows& rows, const tilemoe_tensor& out, void* stream) {
  if (rows.capacity == 0) return;
  const int64_t row_vectors = out.stride[0] * 2 / 16;  // of 16-bit elements, 16 bytes each
  const KernelLaunch where{.blocks = dim3(static_cast<unsigned>(current_device().sms)),
                           .threads = kThreads,
                           .stream = static_cast<cudaStream_t>(stream)};
  launch_kernel("zeros in rows without a token", where, clear_from, rows.offsets + rows.E,
                rows.capacity, row_vectors, static_cast<uint4*>(out.data));
}

}  // namespace tilemoe::cuda
