// tilemoe_cuda_cases: cases of the registry, and the simulator's of the router, on the GPU. Less than
// `tilemoe check`, and quick to build: simulator/mutants runs it once a defect.
//
//   tilemoe_cuda_cases                    lists the quick cases in bfloat16, and the router's
//   tilemoe_cuda_cases REPEATS CASE...    runs these, the layer's so often with the same bits
//
// Status 1 where a result is wrong, 2 where a case could not be run.
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include "simulator/router_cases.h"
#include "verify/check.h"
#include "verify/registry.h"

// Of a build that notes which places its kernels reach (simulator/mutants/switches.py).
extern "C" bool tilemoe_write_notes(const char* name) __attribute__((weak));

namespace {

using namespace tilemoe;

void list() {
  for (const verify::Case& one : verify::verification_cases())
    if (one.reduced && one.dtype == DType::kBFloat16) std::cout << one.name << "\n";
  for (const simulator::RouterCase& one : simulator::router_cases()) std::cout << one.name << "\n";
}

std::string failures_of(const verify::Case& one) {
  const verify::Report report = verify::check_case(one, 1, verify::cuda_memory());
  std::ostringstream text;
  for (const verify::TensorReport& tensor : report.tensors)
    if (!tensor.passed)
      text << "\n  " << verify::output_name(tensor.output) << ": "
           << verify::describe(tensor.figures, tensor.limit);
  for (const std::string& damage : report.damage) text << "\n  " << damage;
  return text.str();
}

// What is wrong with the layer in this case, also on whole numbers; `repeats` times with the same
// bits.
std::string wrong_in_layer(const verify::Case& one, int64_t repeats) {
  std::string wrong = failures_of(one);
  if (verify::has_integer_form(one)) wrong += failures_of(verify::integer_form(one));
  if (repeats == 0) return wrong;
  const int64_t other =
      verify::find_other_bits(one, 1, repeats, verify::cuda_memory(), verify::Passes::kAll);
  if (other >= 0) wrong += "\n  run " + std::to_string(other) + " has other bits than run 0";
  return wrong;
}

std::string wrong_in(const std::string& name, int64_t repeats) {
  for (const simulator::RouterCase& one : simulator::router_cases())
    if (one.name == name) return simulator::compare_devices(one, 1);
  if (const verify::Case* const one = verify::find_case(name)) return wrong_in_layer(*one, repeats);
  throw std::invalid_argument("there is no such case");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    list();
    return 0;
  }
  int status = 0;
  for (int i = 2; i < argc; ++i) {
    try {
      const std::string wrong = wrong_in(argv[i], std::atoll(argv[1]));
      std::cout << argv[i] << ": " << (wrong.empty() ? "right" : "WRONG") << wrong << std::endl;
      if (!wrong.empty()) status = 1;
    } catch (const std::exception& error) {
      std::cerr << argv[i] << ": " << error.what() << std::endl;
      return 2;
    }
  }
  const char* const notes = std::getenv("TILEMOE_DEFECTS_REACHED");
  if (tilemoe_write_notes != nullptr && notes != nullptr && !tilemoe_write_notes(notes)) return 2;
  return status;
}
