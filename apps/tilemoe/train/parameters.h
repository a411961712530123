// The model's parameters: values, gradients, and what the optimiser has to know of each.
#pragma once

#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "train/operators.h"

namespace tilemoe::train {

enum class ParameterGroup {
  kMatrix,  // decayed
  kHead,    // a learning rate of its own
  kOther,
};

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  ParameterGroup group = ParameterGroup::kOther;
  FloatArray value;
  FloatArray gradient;

  int64_t size() const { return value.size(); }
};

class ParameterStore {
 public:
  // The parameters lie where `operators` work on them. One that would make them more than `most`
  // numbers in all is refused with std::runtime_error, before its memory is taken.
  explicit ParameterStore(uint64_t seed, Operators& operators = cpu_operators(),
                          int64_t most = std::numeric_limits<int64_t>::max())
      : seed_(seed), operators_(operators), most_(most) {}

  // Drawn from N(0, deviation^2) by (seed, name): the order of the calls does not matter, and
  // models that share a parameter's name and shape begin with the same values.
  Parameter& add_normal(const std::string& name, std::vector<int64_t> shape, ParameterGroup group,
                        double deviation);
  Parameter& add_constant(const std::string& name, std::vector<int64_t> shape, ParameterGroup group,
                          float value);

  // References to parameters stay valid.
  std::deque<Parameter>& all() { return parameters_; }
  const std::deque<Parameter>& all() const { return parameters_; }
  int64_t count() const;  // numbers in all parameters
  Operators& operators() const { return operators_; }

 private:
  Parameter& add(const std::string& name, std::vector<int64_t> shape, ParameterGroup group);

  uint64_t seed_;
  Operators& operators_;
  int64_t most_;
  std::deque<Parameter> parameters_;
};

}  // namespace tilemoe::train
