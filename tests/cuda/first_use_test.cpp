// The library's first kernels of a process lie inside the capture of a CUDA graph: forward and
// backward, replayed with new data. One-time setup (attributes of kernels, the number of SMs, the
// encoder of tensor maps) must neither wait for the device nor be captured. A separate program with
// one test: any test before it would be the first use.
#include <gtest/gtest.h>

#include <array>

#include "cuda/device_layer.h"

namespace tilemoe::test {
namespace {

TEST(FirstUse, LiesInsideACapture) {
  DeviceLayer layer(1);
  const std::array<uint64_t, 3> routings{7, 8, 9};
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  layer.poison();
  check_cuda(cudaDeviceSynchronize());
  check_cuda(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
  layer.enqueue(stream.get());
  layer.enqueue_backward(stream.get());
  check_cuda(cudaStreamEndCapture(stream.get(), &graph));
  check_cuda(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<DeviceLayer::Bits> replayed;
  for (const uint64_t routing : routings) {
    layer.write_logits(routing);
    layer.poison();
    check_cuda(cudaDeviceSynchronize());
    check_cuda(cudaGraphLaunch(replay, stream.get()));
    replayed.push_back(layer.bits());
    EXPECT_TRUE(layer.is_whole());
  }
  EXPECT_FALSE(replayed[0] == replayed[1]);
  for (size_t i = 0; i < routings.size(); ++i) {
    layer.write_logits(routings[i]);
    layer.poison();
    layer.enqueue(nullptr);
    layer.enqueue_backward(nullptr);
    EXPECT_TRUE(layer.bits() == replayed[i]) << "routing " << i;
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

}  // namespace
}  // namespace tilemoe::test
