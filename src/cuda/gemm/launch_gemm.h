// Launches a persistent grouped GEMM of any arch on the device of its plan: the grid is one wave of
// CTAs over the SMs, or tuning.ctas_per_sm of them, and never more CTAs than there are tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/device.h"
#include "cuda/core/experts_plan.h"
#include "cuda/core/launch.h"

namespace tilemoe::cuda {

// What one SM holds of a Gemm: its CTAs at a time, and the shared memory and stages of each.
struct GemmResidency {
  int ctas;
  int shared_bytes;
  int stages;  // 0: the Gemm has a constant number
};

// sm80 fits its stages to the device (Gemm::room_on()). A CTA of the other arches uses nearly all
// of an SM's shared memory, so the SM holds one.
template <class Gemm>
GemmResidency residency_of(const DeviceInfo& device) {
  if constexpr (requires { Gemm::room_on(device); }) {
    const auto room = Gemm::room_on(device);
    return {.ctas = room.blocks,
            .shared_bytes = Gemm::shared_bytes(room.stages),
            .stages = room.stages};
  } else {
    return {.ctas = 1, .shared_bytes = Gemm::kSharedBytesUsed, .stages = 0};
  }
}

// SMs that a cluster occupies alone, if the grid counts whole clusters of SMs.
template <class Gemm>
constexpr int sms_of_cluster() {
  if constexpr (requires { Gemm::kSmsPerCluster; })
    return Gemm::kSmsPerCluster;
  else
    return 1;
}

// `max_tiles` is known on the host, unlike the number of tiles: a small problem starts fewer CTAs.
template <auto kKernel, class Gemm>
void launch_gemm(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
                 const Tuning& tuning) {
  constexpr int kSms = sms_of_cluster<Gemm>();
  constexpr int64_t kTogether = Gemm::Order::kTogether;
  const DeviceInfo& device = device_of(tuning.plan);
  static OncePerDevice<GemmResidency> residencies;
  const GemmResidency residency = residencies.get(device.index, [&] {
    const GemmResidency found = residency_of<Gemm>(device);
    TILEMOE_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            found.shared_bytes),
                       found.shared_bytes << " bytes of shared memory for a grouped GEMM");
    return found;
  });
  const int64_t sms = int64_t{std::max(device.sms / kSms, 1)} * kSms;
  const int64_t at_once = sms * residency.ctas * tuning.ctas_per_sm / kTogether;
  const int64_t ctas = std::min(std::max<int64_t>(at_once, 1), max_tiles) * kTogether;
  const PdlLaunch where{.device = device,
                        .blocks = dim3(static_cast<unsigned>(ctas)),
                        .threads = Gemm::kThreads,
                        .stream = static_cast<cudaStream_t>(stream),
                        .shared_bytes = residency.shared_bytes,
                        .pdl = tuning.pdl,
                        .cluster = Gemm::Shape::kCluster};
  if constexpr (requires { params.stages; }) {
    typename Gemm::Params with_stages = params;
    with_stages.stages = residency.stages;
    launch_pdl<kKernel>(where, with_stages);
  } else {
    launch_pdl<kKernel>(where, params);
  }
}

}  // namespace tilemoe::cuda
