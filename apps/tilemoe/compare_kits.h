// Two kits compared on a device: each with float64, both with each other bit for bit, and each with
// itself, often. What trial.h has a child do, which says how it goes by lines of JSON:
//
//   {"step": "swiglu/bfloat16 by sm100, against float64", "done": 0.25}
//   {"disagreed": "swiglu/bfloat16, O: other bits than sm80's"}
//   {"error": "cudaErrorIllegalAddress: ..."}                     the last; nothing else can be run
//   {"refused": "this build has no sm100 kit: ..."}               the last, and the first
//   {"finished": {"cases": 40, "tensors": 312, "repeats": 1000}}  the last
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/memory.h"

namespace tilemoe::app {

struct KitComparison {
  std::string kit;        // "sm100"
  std::string reference;  // "sm80"
  std::vector<verify::Case> cases;
  int64_t repeats = 1000;  // of each case by each kit, where nothing disagreed before
  verify::Memory& memory;
  std::function<void(const std::string& kit)> use_kit;
  std::function<void(const nlohmann::json& event)> tell;
};

// Errors of the device are told; whether it is sound after them nobody knows.
void compare_kits(const KitComparison& comparison);

}  // namespace tilemoe::app
