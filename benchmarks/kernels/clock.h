// Times of steps on a device, each with cold caches.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "tilemoe/tensor.h"

namespace tilemoe::app {

struct StepTime {
  std::string step;
  double ms;
};

class Clock : public StepObserver {
 public:
  // Waits for the steps since the last call; a step that ran several times is one entry.
  virtual std::vector<StepTime> collect() = 0;
  double ms(const std::function<void()>& body);
};

// Times by the device's own clock; a step's begin() makes its caches cold.
std::unique_ptr<Clock> make_clock(Device device);
// Throws in a build without CUDA.
std::unique_ptr<Clock> make_cuda_clock();

// Entries of equal names added up, in the order of their first.
std::vector<StepTime> summed(const std::vector<StepTime>& times);

using Samples = std::vector<double>;

// Times of runs that are interleaved, so that a change of clocks meets all of them. The first round
// warms up and does not count.
std::vector<Samples> interleaved_ms(Clock& clock, const std::vector<std::function<void()>>& runs,
                                    int rounds);

}  // namespace tilemoe::app
