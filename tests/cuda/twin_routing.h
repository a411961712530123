// The same routing on the host and on the device: one layout, poisoned memory, a workspace each.
#pragma once

#include <memory>

#include "cuda/device_tensors.h"
#include "tilemoe/layer.h"

namespace tilemoe::test {

inline void expect_ok(tilemoe_status status) {
  ASSERT_EQ(status, TILEMOE_SUCCESS) << tilemoe_last_error();
}

template <class Args>
Args sized() {
  Args args{};
  args.struct_size = sizeof args;
  return args;
}

inline tilemoe_routing_spec on_device(tilemoe_routing_spec spec) {
  spec.device = TILEMOE_CUDA;
  return spec;
}

class TwinRouting {
 public:
  explicit TwinRouting(const tilemoe_routing_spec& spec)
      : memory_(routing_bytes(spec)),
        host_workspace_(workspace_bytes(spec)),
        device_workspace_(workspace_bytes(on_device(spec))) {
    const tilemoe_routing_spec device_spec = on_device(spec);
    const size_t bytes = routing_bytes(spec);
    host_.struct_size = device_.struct_size = sizeof(tilemoe_routing);
    expect_ok(tilemoe_routing_bind(&spec, memory_.host(), bytes, &host_));
    expect_ok(tilemoe_routing_bind(&device_spec, memory_.device(), bytes, &device_));
  }

  tilemoe_routing& host() { return host_; }
  tilemoe_routing& device() { return device_; }
  TwinBuffer& memory() { return memory_; }
  // Fills the workspace of an args struct.
  template <class Args>
  void lend_workspace(bool device, Args& args) {
    TwinBuffer& workspace = device ? device_workspace_ : host_workspace_;
    args.workspace = device ? workspace.device() : workspace.host();
    args.workspace_bytes = contents(workspace);
  }

  // Runs call(on the device, routing, workspace, bytes) on both sides; the routings are equal then.
  template <class Call>
  void build(const Call& call) {
    for (const bool device : {false, true}) {
      TwinBuffer& workspace = device ? device_workspace_ : host_workspace_;
      call(device, device ? device_ : host_, device ? workspace.device() : workspace.host(),
           contents(workspace));
    }
    expect_cuda(cudaDeviceSynchronize(), "routing");
    expect_same("built");
  }
  int32_t counter(int which) const { return host_.counters[which]; }
  int32_t rows() const { return host_.offsets[host_.spec.E]; }

  // Every byte of the device's memory is that of the host's, poison included.
  void expect_same(const std::string& what) {
    EXPECT_TRUE(memory_.download() == memory_.host_bytes()) << what << ": the routings differ";
    const std::vector<uint8_t> bytes = device_workspace_.download();
    for (size_t i = 0; i < TwinBuffer::kGuard; ++i) {
      ASSERT_EQ(bytes[i], TwinBuffer::kPoison) << what << ": written before the workspace";
      ASSERT_EQ(bytes[bytes.size() - 1 - i], TwinBuffer::kPoison)
          << what << ": written behind the workspace";
    }
  }

 private:
  static size_t contents(const TwinBuffer& buffer) {
    return buffer.host_bytes().size() - 2 * TwinBuffer::kGuard;
  }
  static size_t routing_bytes(const tilemoe_routing_spec& spec) {
    size_t bytes = 0;
    expect_ok(tilemoe_routing_bytes(&spec, &bytes));
    return bytes;
  }
  static size_t workspace_bytes(const tilemoe_routing_spec& spec) {
    size_t bytes = 0;
    expect_ok(tilemoe_routing_workspace_bytes(&spec, &bytes));
    return bytes;
  }

  TwinBuffer memory_, host_workspace_, device_workspace_;
  tilemoe_routing host_{}, device_{};
};

// (T, E) with `gap` elements of NaN behind every row.
class TwinLogits {
 public:
  TwinLogits(tilemoe_dtype dtype, int64_t T, int64_t E, int64_t gap)
      : T_(T), E_(E), width_(E + gap), tensor_(dtype, {T, E + gap}) {}

  void fill(const std::vector<float>& values) {
    tensor_.fill([&](int64_t i) {
      const int64_t t = i / width_, e = i % width_;
      return static_cast<double>(e < E_ ? values[static_cast<size_t>(t * E_ + e)]
                                        : std::numeric_limits<float>::quiet_NaN());
    });
  }
  tilemoe_tensor on(bool device) {
    tilemoe_tensor view = device ? tensor_.device() : tensor_.host();
    view.shape[1] = E_;
    return view;
  }
  double at(const std::vector<uint8_t>& bytes, int64_t t, int64_t e) const {
    return tensor_.at(bytes, t * width_ + e);
  }
  TwinBuffer& buffer() { return tensor_.buffer(); }
  int64_t T() const { return T_; }
  int64_t E() const { return E_; }

 private:
  int64_t T_, E_, width_;
  TwinTensor tensor_;
};

}  // namespace tilemoe::test
