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

struct ParameterRules {
  int64_t max_numbers = std::numeric_limits<int64_t>::max();  // in all parameters together
  bool trained = true;       // else they have no gradients and no first values
  Memory* memory = nullptr;  // of the parameters; that of `operators` without one
};

class ParameterStore {
 public:
  // A parameter that would make them more than `rules.max_numbers` numbers is refused with
  // std::runtime_error, before its memory is taken.
  explicit ParameterStore(uint64_t seed, Operators& operators = cpu_operators(),
                          const ParameterRules& rules = {})
      : seed_(seed),
        operators_(operators),
        rules_(rules),
        memory_(rules.memory != nullptr ? *rules.memory : operators.memory()) {}

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
  Memory& memory() const { return memory_; }
  // Whether parameters are given first values.
  bool initialized() const { return rules_.trained && rules_.memory == nullptr; }

 private:
  Parameter& add(const std::string& name, std::vector<int64_t> shape, ParameterGroup group);

  uint64_t seed_;
  Operators& operators_;
  ParameterRules rules_;
  Memory& memory_;
  std::deque<Parameter> parameters_;
};

}  // namespace tilemoe::train
