#include "checker.h"

#include "tilemoe/error.h"
#include "verify/registry.h"

namespace tilemoe::app {

Checker::Checker(uint64_t seed, int64_t repeats, verify::Memory& memory, verify::Passes passes)
    : seed_(seed), repeats_(repeats), memory_(memory), passes_(passes) {}

void Checker::run(const verify::Case& test_case) {
  if (!judge(test_case) || test_case.too_large) return;
  if (repeats_ > 0) repeat(test_case);
  if (verify::has_integer_form(test_case)) judge(verify::integer_form(test_case));
}

// What the backend refuses is a failure: a case is there to be verified. False where it did.
bool Checker::judge(const verify::Case& test_case) {
  const std::string name =
      test_case.name + (test_case.data == verify::Data::kIntegers ? " (integers)" : "");
  verify::Report report;
  try {
    report = verify::check_case(test_case, seed_, memory_, passes_);
  } catch (const Error& error) {
    if (error.status() != Status::kUnsupported) throw;
    failures_.push_back(name + ": " + error.what());
    ++refused_;
    return false;
  }
  for (const verify::TensorReport& tensor : report.tensors) add(name, tensor);
  for (const std::string& line : report.damage) failures_.push_back(name + ": " + line);
  return true;
}

void Checker::repeat(const verify::Case& test_case) {
  const int64_t other = verify::find_other_bits(test_case, seed_, repeats_, memory_, passes_);
  if (other >= 0)
    failures_.push_back(test_case.name + ": run " + std::to_string(other) +
                        " has other bits than run 0");
}

void Checker::add(const std::string& name, const verify::TensorReport& tensor) {
  const char* output = verify::output_name(tensor.output);
  const verify::Figures& figures = tensor.figures;
  const verify::Limit& limit = tensor.limit;
  const bool good = tensor.passed && tensor.missed_spoilings.empty();
  table_.add({name, output, scientific(figures.frobenius, 2), scientific(limit.frobenius, 2),
              scientific(figures.worst_row, 2), scientific(limit.worst_row, 2),
              good ? "ok" : "FAILED"});
  ++tensors_;
  spoilings_ += tensor.spoilings_tried;
  const std::string place = name + ", " + output + ": ";
  for (const std::string& spoiling : tensor.impossible_spoilings)
    impossible_.push_back(place + spoiling);
  if (!tensor.passed) failures_.push_back(place + describe(figures, limit));
  for (const std::string& spoiling : tensor.missed_spoilings)
    failures_.push_back(place + "the limit lets pass: " + spoiling);
}

}  // namespace tilemoe::app
