// The layer that `tilemoe bench --device cuda` times: router product by cuBLASLt, top-K, routing,
// experts and combine, on random data of a case's shape in the GPU's memory.
#pragma once

#include <memory>
#include <vector>

#include "bench_steps.h"
#include "cuda/cublaslt.h"
#include "cuda/device.h"
#include "tilemoe/layer.h"
#include "verify/case.h"

namespace tilemoe::app {

// The GPU's clock: each step begins with a cold cache. Entries appear with collect().
class DeviceClock final : public StepClock {
 public:
  explicit DeviceClock(const DeviceCacheFlush& flush) : flush_(flush) {}
  // Waits for the steps.
  void collect();

 private:
  struct Span {
    const char* step;
    Event begin, end;
  };
  void begin(const char* step) override;
  void end(const char* step) override;

  const DeviceCacheFlush& flush_;
  std::vector<std::unique_ptr<Span>> spans_;
};

class GpuLayer {
 public:
  // Throws std::runtime_error where the case is not one to be timed or does not fit.
  explicit GpuLayer(const verify::Case& layer);

  void router();  // the dense product alone: the application's part
  void library(StepClock* clock = nullptr);
  void forward(StepClock* clock = nullptr);  // both

  int64_t rows() const;  // M of the last forward
  size_t saved_bytes() const { return experts_.saved_bytes(spec_).total; }
  size_t workspace_bytes() const { return workspace_.bytes(); }

 private:
  void fill();
  void route(StepClock* clock);

  verify::Case case_;
  Experts experts_;
  RoutingSpec spec_;
  DeviceBuffer W1_, W2_, Wr_, X_, O_, H_, logits_, chosen_logits_, ids_, scores_;
  DeviceBuffer routing_memory_, routing_workspace_, workspace_;
  LtProduct router_;
  Routing routing_;
  Saved saved_;
};

}  // namespace tilemoe::app
