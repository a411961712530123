// Hashes of a case's outputs: if two devices, or a device and its simulation, have the same hashes,
// their outputs have the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"
#include "inputs.h"
#include "memory.h"
#include "problem.h"
#include "reference.h"

namespace tilemoe::verify {

struct TensorDigest {
  Output output;
  uint64_t hash;
};

struct CaseDigests {
  // Hash of everything that the case reads. If it differs, the outputs may differ as well: the
  // inputs result from the C library's log() and cos(), whose last bits vary.
  uint64_t inputs;
  std::vector<TensorDigest> tensors;
};

// FNV-1a in 64 bits over the numbers' bits as float32, which represents every type here, least
// significant byte first: independent of the tensor's layout in memory.
uint64_t digest_of(const std::vector<float>& numbers);

CaseDigests digests_of(const Inputs& inputs, const Computed& computed, Passes passes);

// Runs the case.
CaseDigests digest_case(const Case& test_case, uint64_t seed, Memory& memory,
                        Passes passes = Passes::kAll);

// Sixteen hexadecimal digits.
std::string hexadecimal(uint64_t hash);

}  // namespace tilemoe::verify
