#include "checker.h"

#include "table.h"

namespace tilemoe::app {
namespace {

template <class Item>
void append(std::vector<Item>& to, const std::vector<Item>& items) {
  to.insert(to.end(), items.begin(), items.end());
}

}  // namespace

Checker::Checker(uint64_t seed, int64_t repeats, verify::Memory& memory, verify::Passes passes)
    : seed_(seed), repeats_(repeats), memory_(memory), passes_(passes) {}

void Checker::run(const verify::Case& test_case) {
  const verify::Outcome one = verify::run_case(test_case, seed_, repeats_, memory_, passes_);
  append(all_.rows, one.rows);
  append(all_.failures, one.failures);
  append(all_.impossible, one.impossible);
  all_.spoilings += one.spoilings;
  all_.refused += one.refused;
}

void Checker::print(std::ostream& out) const {
  Table table({{"case", Table::Align::kLeft},
               {"tensor", Table::Align::kLeft},
               {"Frobenius"},
               {"limit"},
               {"worst row"},
               {"limit"},
               {"", Table::Align::kLeft}});
  for (const verify::Outcome::Row& row : all_.rows) {
    const verify::Figures& figures = row.tensor.figures;
    const verify::Limit& limit = row.tensor.limit;
    table.add({row.name, verify::output_name(row.tensor.output), scientific(figures.frobenius, 2),
               scientific(limit.frobenius, 2), scientific(figures.worst_row, 2),
               scientific(limit.worst_row, 2), row.good() ? "ok" : "FAILED"});
  }
  table.print(out);
}

}  // namespace tilemoe::app
