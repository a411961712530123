// The GPU's clock, name and versions.
#include <fstream>

#include "cuda/device.h"  // of apps/tilemoe
#include "report.h"

namespace tilemoe::app {
namespace {

class DeviceClock final : public Clock {
 public:
  std::vector<StepTime> collect() override {
    std::vector<StepTime> times;
    for (const auto& span : spans_) times.push_back({span->step, span->end.ms_since(span->begin)});
    spans_.clear();
    return summed(times);
  }

 private:
  struct Span {
    std::string step;
    Event begin, end;
  };
  void begin(const char* step) override {
    flush_();
    spans_.push_back(std::make_unique<Span>());
    spans_.back()->step = step;
    spans_.back()->begin.record();
  }
  void end(const char*) override { spans_.back()->end.record(); }

  const DeviceCacheFlush flush_;
  std::vector<std::unique_ptr<Span>> spans_;
};

}  // namespace

std::unique_ptr<Clock> make_cuda_clock() {
  return std::make_unique<DeviceClock>();
}

std::string cuda_device_name() {
  return gpu_name();
}

void add_cuda_versions(Values& versions) {
  std::string release = "unknown";
  std::ifstream("/sys/module/nvidia/version") >> release;
  versions["driver"] = release;
  versions["cuda_driver"] = driver_version();
  versions["cuda_runtime"] = runtime_version();
}

}  // namespace tilemoe::app
