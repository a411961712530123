// A GPU: memory, events, errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "tilemoe/tensor.h"

namespace tilemoe::app {

// Throws std::runtime_error: what was tried, CUDA's name and text of the error.
void check_cuda(cudaError_t error, const char* what);

// Memory of the current device; what is in it is arbitrary.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(size_t bytes);
  DeviceBuffer(DType dtype, int64_t elements)
      : DeviceBuffer(size_of(dtype) * static_cast<size_t>(elements)) {}

  void* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  void write(const void* from_host, size_t bytes);
  void read(void* to_host, size_t bytes) const;

 private:
  struct Free {
    void operator()(void* memory) const { cudaFree(memory); }
  };
  std::unique_ptr<void, Free> data_;
  size_t bytes_ = 0;
};

class Event {
 public:
  Event();
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record() { check_cuda(cudaEventRecord(event_), "cudaEventRecord"); }
  // Waits for this event.
  double ms_since(const Event& begin) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Milliseconds on the device of what `body` puts on the default stream.
template <class Body>
double device_ms(Body&& body) {
  Event begin, end;
  begin.record();
  body();
  end.record();
  return end.ms_since(begin);
}

// Overwrites more than the second-level cache of any GPU holds.
class DeviceCacheFlush {
 public:
  void operator()() const;

 private:
  DeviceBuffer buffer_{size_t{256} << 20};
};

// "NVIDIA H100 80GB HBM3", and "13.0" of the driver and of the runtime that is linked in.
std::string gpu_name();
std::string driver_version();
std::string runtime_version();

}  // namespace tilemoe::app
