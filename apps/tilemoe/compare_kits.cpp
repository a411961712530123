#include "compare_kits.h"

#include <exception>

#include "checker.h"
#include "verify/check.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;
using verify::Case;
using verify::Passes;

constexpr uint64_t kSeed = 1;

class Comparison {
 public:
  explicit Comparison(const KitComparison& asked) : asked_(asked) {}

  void run() {
    for (const Case& one : asked_.cases) {
      check(one, asked_.reference);
      check(one, asked_.kit);
      compare(one);
    }
    if (!disagreed_)
      for (const Case& one : asked_.cases) {
        repeat(one, asked_.reference);
        repeat(one, asked_.kit);
      }
    asked_.tell({{"finished",
                  {{"cases", asked_.cases.size()},
                   {"tensors", tensors_},
                   {"repeats", disagreed_ ? 0 : asked_.repeats}}}});
  }

 private:
  // Before it is begun, so that the last one told is the one that hung.
  void begin(const std::string& step) {
    constexpr double kStepsOfACase = 5;
    const auto steps = kStepsOfACase * static_cast<double>(asked_.cases.size());
    asked_.tell({{"step", step}, {"done", begun_++ / steps}});
  }
  void disagree(const std::string& what) {
    disagreed_ = true;
    asked_.tell({{"disagreed", what}});
  }

  // Two tensors of whole numbers, or one within its bounds, for each output.
  void check(const Case& one, const std::string& kit) {
    begin(one.name + " by " + kit + ", against float64");
    asked_.use_kit(kit);
    Checker checker(kSeed, 0, asked_.memory, Passes::kAll);
    checker.run(one);
    tensors_ += checker.tensors();
    for (const std::string& failure : checker.failures()) disagree(kit + ", " + failure);
  }

  void compare(const Case& one) {
    begin(one.name + " by " + asked_.reference + " and " + asked_.kit + ", bit for bit");
    asked_.use_kit(asked_.reference);
    const auto change = [&] { asked_.use_kit(asked_.kit); };
    for (const std::string& output :
         verify::outputs_changed_by(change, one, kSeed, asked_.memory, Passes::kAll))
      disagree(one.name + ", " + output + ": other bits than " + asked_.reference + "'s");
  }

  void repeat(const Case& one, const std::string& kit) {
    begin(one.name + " by " + kit + ", " + std::to_string(asked_.repeats) + " times");
    asked_.use_kit(kit);
    const int64_t other =
        verify::find_other_bits(one, kSeed, asked_.repeats, asked_.memory, Passes::kAll);
    if (other >= 0)
      disagree(kit + ", " + one.name + ": run " + std::to_string(other) +
               " has other bits than run 0");
  }

  const KitComparison& asked_;
  int tensors_ = 0;
  int begun_ = 0;
  bool disagreed_ = false;
};

}  // namespace

void compare_kits(const KitComparison& comparison) {
  try {
    Comparison(comparison).run();
  } catch (const std::exception& error) {
    comparison.tell({{"error", error.what()}});
  }
}

}  // namespace tilemoe::app
