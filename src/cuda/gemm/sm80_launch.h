// Starts a grouped GEMM on the current device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/sm80.h"

namespace tilemoe::cuda::sm80 {

// `max_tiles` is known on the host: idle blocks are not started for tiny problems.
template <class Gemm>
void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
            const Tuning& tuning) {
  constexpr auto kKernel = grouped_gemm<Gemm>;
  constexpr int64_t kTogether = Gemm::Order::kTogether;
  const DeviceInfo& device = current_device();
  static OncePerDevice<BlockRoom> rooms;
  const BlockRoom room = rooms.get(device.index, [&] {
    const BlockRoom found =
        block_room(shared_bytes_of_block(device), Gemm::kStageBytes, Gemm::kOtherBytes,
                   {.blocks = Gemm::kBlocksAtOnce, .stages = Gemm::kMaxStages});
    const int bytes = Gemm::shared_bytes(found.stages);
    TILEMOE_CHECK_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        bytes << " bytes of shared memory for a grouped GEMM");
    return found;
  });
  const int64_t at_once = int64_t{device.sms} * room.blocks * tuning.ctas_per_sm / kTogether;
  const int64_t blocks = std::min(std::max<int64_t>(at_once, 1), max_tiles) * kTogether;
  typename Gemm::Params with_stages = params;
  with_stages.stages = room.stages;
  launch_pdl<kKernel>({.blocks = dim3(static_cast<unsigned>(blocks)),
                       .threads = Gemm::Shape::kThreads,
                       .stream = static_cast<cudaStream_t>(stream),
                       .shared_bytes = Gemm::shared_bytes(room.stages),
                       .pdl = tuning.pdl},
                      with_stages);
}

}  // namespace tilemoe::cuda::sm80
