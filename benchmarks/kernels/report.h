// The output of tilemoe_kernels: a table for each layer, and a results file of one
// measurement per line (python/tilemoe/bench/records.py).
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "clock.h"
#include "tilemoe/tensor.h"

namespace tilemoe::app {

using Values = nlohmann::ordered_json;

// The least work of a step: multiplications and additions, and bytes with every tensor
// counted once.
struct Work {
  double flop = 0, bytes = 0;
  Work operator+(const Work& other) const { return {flop + other.flop, bytes + other.bytes}; }
};

// The highest rates of a device: of a large dense GEMM, and of a copy.
struct Limits {
  double flop_per_s = 0, bytes_per_s = 0;  // 0: unknown
  // 0 if it is unknown.
  double ms(const Work& work) const;
};

struct Quartiles {
  double first, median, third;
};
// Interpolated between the nearest samples, at least one.
Quartiles quartiles(Samples samples);
double median(Samples samples);
// [first quartile, median, third quartile]
Values triple(const Quartiles& q);

// The device that is measured. "unknown" if the operating system does not name it.
std::string device_name(Device device);
std::string cuda_device_name();
Values versions_of(Device device);
void add_cuda_versions(Values& versions);

class Report {
 public:
  Report(Device device, Limits limits, std::string json_file);

  const std::string& device() const { return device_; }
  // A row of the table with the times, rates and limit of steps that run one after the other; a
  // measurement of the same.
  void add_times(const std::string& name, const Samples& ms, const std::vector<Work>& steps,
                 const Values& more = Values::object());
  // A measurement with values of its own.
  void add(const std::string& name, Values values);
  // Prints the rows since the last call under a title.
  void print(const std::string& title);
  // The file, as a whole.
  void write() const;

 private:
  std::string device_;
  Values versions_;
  Limits limits_;
  std::string json_file_, lines_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace tilemoe::app
