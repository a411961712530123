#include "simulator/expected_digests.h"

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>

namespace tilemoe::simulator {

using nlohmann::json;

bool has_known_bits(const verify::Case& test_case, verify::Output output) {
  switch (test_case.activation) {
    case Activation::kIdentity:
    case Activation::kReLU:
    case Activation::kReLUSquared:
    case Activation::kReGLU: return true;
    default: return output == verify::kH;
  }
}

ExpectedDigests::ExpectedDigests(const std::string& file, const std::string& arch) {
  std::ifstream stream(file);
  if (!stream) throw std::runtime_error("cannot read " + file);
  try {
    for (std::string line; std::getline(stream, line);) {
      const json measurement = json::parse(line);
      json values = measurement.at("values");
      if (!values.contains("case") || values.at("arch") != arch) continue;
      device_ = measurement.at("device").get<std::string>();
      const std::string name = values.at("case").get<std::string>();
      Expected& expected = cases_[name];
      expected.seed = values.at("seed").get<uint64_t>();
      expected.inputs = values.at("inputs").get<std::string>();
      for (const char* key : {"arch", "case", "seed", "inputs"}) values.erase(key);
      expected.tensors = values.get<std::map<std::string, std::string>>();  // the rest
    }
  } catch (const json::exception& error) {
    throw std::runtime_error(file + " is not a file of digests: " + error.what());
  }
  if (cases_.empty()) throw std::runtime_error(file + " contains no digests of arch " + arch);
}

ExpectedDigests::Comparison ExpectedDigests::compare(const verify::Case& test_case, uint64_t seed,
                                                     const verify::CaseDigests& computed) const {
  const Expected& expected = cases_.at(test_case.name);
  Comparison comparison;
  if (expected.seed != seed) {
    comparison.differences = {"the GPU's numbers have the seed " + std::to_string(expected.seed)};
    return comparison;
  }
  if (expected.inputs != verify::hexadecimal(computed.inputs)) {
    comparison.differences = {"the GPU had other inputs, as another C library makes them"};
    return comparison;
  }
  for (const verify::TensorDigest& tensor : computed.tensors) {
    if (!has_known_bits(test_case, tensor.output)) continue;
    const std::string name = verify::output_name(tensor.output);
    const auto found = expected.tensors.find(name);
    if (found == expected.tensors.end())
      comparison.differences.push_back(name + ": the file has no GPU value");
    else if (found->second != verify::hexadecimal(tensor.hash))
      comparison.differences.push_back(name + ": other bits than the GPU's");
    else
      ++comparison.equal;
  }
  return comparison;
}

}  // namespace tilemoe::simulator
