#include "train/parameters.h"

#include <functional>
#include <numeric>
#include <stdexcept>

#include "train/random.h"

namespace tilemoe::train {

Parameter& ParameterStore::add(const std::string& name, std::vector<int64_t> shape,
                               ParameterGroup group) {
  const int64_t size =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<int64_t>());
  if (size > rules_.max_numbers - count())
    throw std::runtime_error("the model's parameters are more than the " +
                             std::to_string(rules_.max_numbers) + " numbers that exist for them");
  const int64_t gradients = rules_.trained ? size : 0;
  return parameters_.emplace_back(Parameter{.name = name,
                                            .shape = std::move(shape),
                                            .group = group,
                                            .value = FloatArray(size, memory_),
                                            .gradient = FloatArray(gradients, memory_)});
}

Parameter& ParameterStore::add_normal(const std::string& name, std::vector<int64_t> shape,
                                      ParameterGroup group, double deviation) {
  Parameter& parameter = add(name, std::move(shape), group);
  if (!initialized()) return parameter;
  const RandomStream random(seed_, name);
  std::vector<float> values(static_cast<size_t>(parameter.size()));
  for_row_blocks(parameter.size(), [&](int64_t first, int64_t last, int64_t) {
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(last); ++i)
      values[i] = static_cast<float>(deviation * random.normal(i));
  });
  parameter.value.write(values);
  return parameter;
}

Parameter& ParameterStore::add_constant(const std::string& name, std::vector<int64_t> shape,
                                        ParameterGroup group, float value) {
  Parameter& parameter = add(name, std::move(shape), group);
  if (initialized())
    parameter.value.write(std::vector<float>(static_cast<size_t>(parameter.size()), value));
  return parameter;
}

int64_t ParameterStore::count() const {
  int64_t sum = 0;
  for (const Parameter& parameter : parameters_) sum += parameter.size();
  return sum;
}

}  // namespace tilemoe::train
