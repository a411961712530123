// The factors of a case's adapters, or their gradients, as tensors.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "inputs.h"
#include "memory.h"
#include "tilemoe/layer.h"

namespace tilemoe::verify {

class LoraTensors {
 public:
  // Which of the adapters' tensors exist.
  struct Parts {
    bool lora_1, lora_2;
  };
  LoraTensors(const Case& test_case, DType dtype, Parts parts, Memory& memory);

  Lora view() const;
  LoraGradients gradients() const;
  void write(const LoraValues& values);
  LoraValues read() const;  // absent tensors are empty

  // The existing tensors, by the names of tilemoe_lora.
  std::vector<std::pair<const char*, GuardedTensor*>> tensors();

 private:
  // Calls visit(part, index in the part, index in the values) for each element: part 1 is up's.
  template <class Visit>
  void for_each_of_A1(Visit&& visit) const;
  template <class Visit>
  void for_each_of_B1(Visit&& visit) const;

  const Case case_;
  bool split_;
  std::optional<GuardedTensor> A1_, B1_, A1_up_, B1_up_, A2_, B2_;
};

}  // namespace tilemoe::verify
