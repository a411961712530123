// Time and work of single steps.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "step_observer.h"
#include "verify/case.h"

namespace tilemoe::app {

inline double milliseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Milliseconds by step, in the order in which the steps first ran.
class StepClock : public StepObserver {
 public:
  template <class Body>
  void time(const char* step, Body&& body) {
    begin(step);
    body();
    end(step);
  }

  struct Entry {
    std::string step;
    double ms;
  };
  const std::vector<Entry>& entries() const { return entries_; }

 protected:
  void add(const char* step, double ms);

 private:
  std::vector<Entry> entries_;
};

// The host's clock: for steps that are done when they return.
class HostClock final : public StepClock {
 private:
  void begin(const char*) override { start_ = std::chrono::steady_clock::now(); }
  void end(const char* step) override { add(step, milliseconds_since(start_)); }
  std::chrono::steady_clock::time_point start_;
};

// Names of the layer's steps, and of what surrounds it.
namespace step {
using namespace tilemoe::step;
inline constexpr const char* kRouter = "router";
inline constexpr const char* kTopK = "top_k";
inline constexpr const char* kRoute = "route";
inline constexpr const char* kRouterBackward = "router_backward";
inline constexpr const char* kRouterGradient = "router_gradient";
}  // namespace step

// A step's matrix product for `rows` rows of one expert: C (rows, columns) = A (rows, depth) B
// (depth, columns), all row-major; a transposed operand is stored the other way round.
struct DenseProduct {
  const char* step;
  bool backward;
  int64_t rows, columns, depth;
  bool A_transposed, B_transposed;
};
// The six of a layer's forward and backward.
std::vector<DenseProduct> dense_products(const verify::Case& layer, int64_t rows);

// What a step has to do at least: multiplications and additions, and bytes with every tensor
// counted once.
struct Work {
  double flop = 0;
  double bytes = 0;

  Work& operator+=(const Work& other) {
    flop += other.flop, bytes += other.bytes;
    return *this;
  }
};
// `rows` is M, the rows that the routing made.
Work work_of(const std::string& step, const verify::Case& layer, int64_t rows);

}  // namespace tilemoe::app
