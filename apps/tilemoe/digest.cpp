// `tilemoe digest`: hashes of what the verification cases compute, as JSON: another device,
// or a simulation of this one, must compute the same bits.
#include "verify/digest.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "build_info.h"
#include "case_options.h"
#include "commands.h"
#include "device.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::app {
namespace {

using nlohmann::json;

struct DigestOptions {
  CaseOptions cases;
  DeviceOptions where;
  std::string folder;
};

// "calibration-relu/bfloat16", dW1: calibration-relu-bfloat16-dW1.f32
void write_numbers(const std::filesystem::path& folder, std::string case_name, const char* output,
                   const std::vector<float>& numbers) {
  std::replace(case_name.begin(), case_name.end(), '/', '-');
  const std::filesystem::path path = folder / (case_name + "-" + output + ".f32");
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(numbers.data()),
             static_cast<std::streamsize>(numbers.size() * sizeof(float)));
  if (!file.flush()) throw std::runtime_error("cannot write " + path.string());
}

json entry_of(const verify::Case& test_case, const DigestOptions& options, verify::Memory& memory) {
  const verify::Inputs inputs = verify::make_inputs(test_case, options.cases.seed);
  verify::Problem problem(inputs, memory);
  problem.run(options.cases.passes());
  const verify::Computed computed = problem.computed();
  const verify::CaseDigests digests = verify::digests_of(inputs, computed, options.cases.passes());
  json tensors = json::object();
  for (const verify::TensorDigest& tensor : digests.tensors) {
    const char* name = verify::output_name(tensor.output);
    tensors[name] = verify::hexadecimal(tensor.hash);
    if (!options.folder.empty())
      write_numbers(options.folder, test_case.name, name, computed[tensor.output]);
  }
  return {{"case", test_case.name},
          {"inputs", verify::hexadecimal(digests.inputs)},
          {"tensors", tensors}};
}

int digest(const DigestOptions& options) {
  const Device device = options.where.select();
  verify::Memory& memory = verify::memory_of(device);
  if (!options.folder.empty()) std::filesystem::create_directories(options.folder);
  json report = {{"hash", "FNV-1a, 64 bits, of the numbers as float32, little-endian"},
                 {"device", tilemoe_device_description(to_c(device))},
                 {"commit", build_info().commit},
                 {"versions", versions()},
                 {"seed", options.cases.seed},
                 {"pass", options.cases.pass},
                 {"cases", json::array()}};
  if (device == Device::kCuda) report["arch"] = tilemoe_cuda_arch();
  for (const verify::Case& test_case : options.cases.choose(device)) {
    if (test_case.too_large)
      throw std::runtime_error(test_case.name + " is too large to be read back whole");
    report["cases"].push_back(entry_of(test_case, options, memory));
  }
  std::cout << report.dump(1) << "\n";
  return 0;
}

}  // namespace

void add_digest(CLI::App& app, Run& run) {
  auto options = std::make_shared<DigestOptions>();
  CLI::App* command = app.add_subcommand(
      "digest", "Print hashes of every tensor that the verification cases compute, as JSON");
  options->cases.add_to(*command);
  command->add_option("--numbers", options->folder,
                      "Also write each tensor to this folder, as float32 in row-major order");
  options->where.add_to(*command);
  command->callback([&run, options] { run = [options] { return digest(*options); }; });
}

}  // namespace tilemoe::app
