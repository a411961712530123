#include "clock.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include "cpu/thread_pool.h"

namespace tilemoe::app {
namespace {

// Writes through more memory than the second-level caches of all cores hold. The third level, which
// a virtual machine shares with others, is not flushed.
void flush_caches() {
  constexpr int64_t kPieces = 256;
  constexpr size_t kPiece = size_t{256} << 10, kLine = 64;
  static std::vector<std::byte> buffer(kPieces * kPiece);
  cpu::parallel_for(kPieces, [&](int64_t piece, int) {
    for (size_t i = 0; i < kPiece; i += kLine)
      buffer[static_cast<size_t>(piece) * kPiece + i] ^= std::byte{1};
  });
}

class HostClock final : public Clock {
 public:
  std::vector<StepTime> collect() override { return summed(std::exchange(times_, {})); }

 private:
  using steady_clock = std::chrono::steady_clock;
  void begin(const char*) override {
    flush_caches();
    start_ = steady_clock::now();
  }
  void end(const char* step) override {
    const std::chrono::duration<double, std::milli> ms = steady_clock::now() - start_;
    times_.push_back({step, ms.count()});
  }

  steady_clock::time_point start_;
  std::vector<StepTime> times_;
};

}  // namespace

double Clock::ms(const std::function<void()>& body) {
  begin("body");
  body();
  end("body");
  return collect().front().ms;
}

std::unique_ptr<Clock> make_clock(Device device) {
  if (device == Device::kCuda) return make_cuda_clock();
  return std::make_unique<HostClock>();
}

std::vector<StepTime> summed(const std::vector<StepTime>& times) {
  std::vector<StepTime> sums;
  for (const StepTime& one : times) {
    const auto same = [&](const StepTime& sum) { return sum.step == one.step; };
    const auto found = std::find_if(sums.begin(), sums.end(), same);
    if (found == sums.end())
      sums.push_back(one);
    else
      found->ms += one.ms;
  }
  return sums;
}

std::vector<Samples> interleaved_ms(Clock& clock, const std::vector<std::function<void()>>& runs,
                                    int rounds) {
  std::vector<Samples> samples(runs.size());
  for (int round = 0; round <= rounds; ++round)
    for (size_t turn = 0; turn < runs.size(); ++turn) {
      const size_t i = round % 2 ? turn : runs.size() - 1 - turn;
      const double ms = clock.ms(runs[i]);
      if (round > 0) samples[i].push_back(ms);
    }
  return samples;
}

}  // namespace tilemoe::app
