#include "outcome.h"

#include "digest.h"
#include "json_text.h"
#include "registry.h"
#include "tilemoe/error.h"

namespace tilemoe::verify {
namespace {

void add(Outcome& outcome, const std::string& name, const TensorReport& tensor) {
  const std::string place = name + ", " + output_name(tensor.output) + ": ";
  outcome.spoilings += tensor.spoilings_tried;
  for (const std::string& spoiling : tensor.impossible_spoilings)
    outcome.impossible.push_back(place + spoiling);
  if (!tensor.passed) outcome.failures.push_back(place + describe(tensor.figures, tensor.limit));
  for (const std::string& spoiling : tensor.missed_spoilings)
    outcome.failures.push_back(place + "a spoiled result is within the limit: " + spoiling);
  outcome.rows.push_back({name, tensor});
}

// False if the backend does not support the case.
bool judge(Outcome& outcome, const Case& test_case, uint64_t seed, Memory& memory, Passes passes) {
  const std::string name =
      test_case.name + (test_case.data == Data::kIntegers ? " (integers)" : "");
  Report report;
  try {
    report = check_case(test_case, seed, memory, passes);
  } catch (const Error& error) {
    if (error.status() != Status::kUnsupported) throw;
    outcome.failures.push_back(name + ": " + error.what());
    ++outcome.refused;
    return false;
  }
  for (const TensorReport& tensor : report.tensors) add(outcome, name, tensor);
  for (const std::string& line : report.damage) outcome.failures.push_back(name + ": " + line);
  return true;
}

void repeat(Outcome& outcome, const Case& test_case, uint64_t seed, int64_t repeats, Memory& memory,
            Passes passes) {
  const int64_t other = find_other_bits(test_case, seed, repeats, memory, passes);
  if (other >= 0)
    outcome.failures.push_back(test_case.name + ": run " + std::to_string(other) +
                               " has other bits than run 0");
}

std::string to_json(const Outcome::Row& row) {
  const Figures& figures = row.tensor.figures;
  const Limit& limit = row.tensor.limit;
  return "{\"case\": " + json_text(row.name) +
         ", \"tensor\": " + json_text(output_name(row.tensor.output)) +
         ", \"frobenius\": " + json_number(figures.frobenius) +
         ", \"frobenius_limit\": " + json_number(limit.frobenius) +
         ", \"worst_row\": " + json_number(figures.worst_row) +
         ", \"worst_row_limit\": " + json_number(limit.worst_row) +
         ", \"passed\": " + (row.good() ? "true" : "false") + ", \"bits\": " +
         (row.tensor.bits == 0 ? "null" : json_text(hexadecimal(row.tensor.bits))) + "}";
}

}  // namespace

Outcome run_case(const Case& test_case, uint64_t seed, int64_t repeats, Memory& memory,
                 Passes passes) {
  Outcome outcome;
  if (!judge(outcome, test_case, seed, memory, passes) || test_case.too_large) return outcome;
  if (repeats > 0) repeat(outcome, test_case, seed, repeats, memory, passes);
  if (has_integer_form(test_case)) judge(outcome, integer_form(test_case), seed, memory, passes);
  return outcome;
}

std::string to_json(const Outcome& outcome) {
  return "{\"rows\": " +
         json_list(outcome.rows, [](const Outcome::Row& row) { return to_json(row); }) +
         ", \"failures\": " + json_list(outcome.failures, json_text) +
         ", \"impossible\": " + json_list(outcome.impossible, json_text) +
         ", \"spoilings\": " + std::to_string(outcome.spoilings) +
         ", \"refused\": " + std::to_string(outcome.refused) + "}";
}

}  // namespace tilemoe::verify
