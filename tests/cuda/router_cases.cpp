// tilemoe_cuda_router_cases: the simulator's small cases of the router, on the GPU: each result
// beside the CPU's.
#include "simulator/router_cases.h"

#include <exception>
#include <iostream>
#include <string>

// The names of the cases; without any, every case. Status 1 where a result is wrong, 2 where a case
// could not be run.
int main(int argc, char** argv) {
  int status = 0, cases = 0;
  for (const tilemoe::simulator::RouterCase& one : tilemoe::simulator::router_cases()) {
    bool asked = argc == 1;
    for (int i = 1; i < argc; ++i) asked |= one.name == argv[i];
    if (!asked) continue;
    ++cases;
    try {
      const std::string wrong = tilemoe::simulator::compare_devices(one, 1);
      std::cout << one.name << ": " << (wrong.empty() ? "right" : "WRONG") << wrong << std::endl;
      if (!wrong.empty()) status = 1;
    } catch (const std::exception& error) {
      std::cerr << one.name << ": " << error.what() << std::endl;
      return 2;
    }
  }
  std::cout << cases << " cases" << std::endl;
  return cases == 0 ? 2 : status;
}
