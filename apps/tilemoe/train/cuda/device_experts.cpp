#include "train/cuda/device_experts.h"

#include <algorithm>
#include <cstring>

#include "cuda/device.h"
#include "routing/half.h"

namespace tilemoe::train {
namespace {

using app::DeviceBuffer;

constexpr int64_t kElementsPerTask = 1 << 16;

// body(first, last) for consecutive blocks of elements, on the CPU's threads.
template <class Body>
void for_blocks(int64_t elements, Body&& body) {
  cpu::parallel_for(ceil_div(elements, kElementsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kElementsPerTask;
    body(first, std::min(elements, first + kElementsPerTask));
  });
}

Experts on_device(Experts experts) {
  experts.device = TILEMOE_CUDA;
  experts.dtype = TILEMOE_BFLOAT16;
  return experts;
}
RoutingSpec on_device(RoutingSpec spec) {
  spec.device = TILEMOE_CUDA;
  return spec;
}

}  // namespace

struct DeviceExperts::Device {
  Experts experts;
  DeviceBuffer X, W1, W2, O, H, routing, workspace;
  std::vector<BFloat16> staging;

  explicit Device(const Experts& on_the_gpu) : experts(on_the_gpu) {}
  void copy_in(ConstFloats from, DeviceBuffer& to) {
    const int64_t count = std::ssize(from);
    for_blocks(count, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        store(from[static_cast<size_t>(i)], staging[static_cast<size_t>(i)]);
    });
    to.write(staging.data(), from.size() * sizeof(BFloat16));
  }
  void copy_out(const DeviceBuffer& from, Floats to) {
    from.read(staging.data(), to.size() * sizeof(BFloat16));
    for_blocks(std::ssize(to), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        to[static_cast<size_t>(i)] = to_float(staging[static_cast<size_t>(i)]);
    });
  }
};

DeviceExperts::DeviceExperts(const Experts& experts, const std::vector<RoutingSpec>& sizes)
    : device_(std::make_unique<Device>(on_device(experts))) {
  Device& device = *device_;
  const int64_t E = experts.E, d = experts.d, n = experts.n, h = experts.h_width();
  int64_t tokens = 0, rows = 0;
  size_t routing_bytes = 0, workspace_bytes = 0;
  for (const RoutingSpec& size : sizes) {
    const RoutingSpec spec = on_device(size);
    tokens = std::max(tokens, spec.T), rows = std::max(rows, spec.bound());
    routing_bytes = std::max(routing_bytes, spec.bytes());
    workspace_bytes =
        std::max(workspace_bytes, device.experts.workspace_bytes(spec, Pass::kForward));
  }
  constexpr DType kType = DType::kBFloat16;
  device.X = DeviceBuffer(kType, tokens * d), device.O = DeviceBuffer(kType, tokens * d);
  device.W1 = DeviceBuffer(kType, E * h * d), device.W2 = DeviceBuffer(kType, E * d * n);
  device.H = DeviceBuffer(kType, rows * h);
  device.routing = DeviceBuffer(routing_bytes);
  device.workspace = DeviceBuffer(workspace_bytes);
  device.staging.resize(
      static_cast<size_t>(std::max({tokens * d, E * h * d, E * d * n, rows * h})));
}
DeviceExperts::~DeviceExperts() = default;

void DeviceExperts::forward(const Routing& routing, ConstFloats X, ConstFloats W1, ConstFloats W2,
                            Floats O, Floats H) {
  Device& device = *device_;
  const int64_t E = device.experts.E, d = device.experts.d, n = device.experts.n,
                h = device.experts.h_width(), tokens = std::ssize(X) / d;
  constexpr DType kType = DType::kBFloat16;
  // The arrays of a routing lie in one block, the same on every device.
  RoutingSpec spec = RoutingSpec::top_k(tokens, E, 1);
  static_cast<tilemoe_routing_spec&>(spec) = routing.spec;
  const RoutingSpec device_spec = on_device(spec);
  device.routing.write(routing.offsets, device_spec.bytes());
  const Routing device_routing(device_spec, device.routing.data(), device.routing.bytes());
  device.copy_in(X, device.X);
  device.copy_in(W1, device.W1);
  device.copy_in(W2, device.W2);

  Saved saved(Tensor(device.H.data(), kType, {routing.capacity(), h}));
  ForwardArgs args;
  args.routing = &device_routing;
  args.weights.W1 = Tensor(device.W1.data(), kType, {E, h, d});
  args.weights.W2 = Tensor(device.W2.data(), kType, {E, d, n});
  args.X = Tensor(device.X.data(), kType, {tokens, d});
  args.O = Tensor(device.O.data(), kType, {tokens, d});
  args.saved = H.empty() ? nullptr : &saved;
  args.workspace = device.workspace.data(), args.workspace_bytes = device.workspace.bytes();
  device.experts.forward(args);
  device.copy_out(device.O, O);
  if (!H.empty()) device.copy_out(device.H, H.first(static_cast<size_t>(routing.offsets[E] * h)));
}

}  // namespace tilemoe::train
