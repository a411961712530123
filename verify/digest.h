// What a case computes as hashes: two devices, or a device and its simulation, that have the same
// hashes have the same bits.
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
  // Of everything that the case reads. Where it differs, so may the rest: the numbers come of the
  // C library's log() and cos(), whose last bits are its own.
  uint64_t inputs;
  std::vector<TensorDigest> tensors;
};

// FNV-1a in 64 bits over the numbers' bits as float32, of which every type here is a part, least
// significant byte first: the same for a tensor however it lies in memory.
uint64_t digest_of(const std::vector<float>& numbers);

CaseDigests digests_of(const Inputs& inputs, const Computed& computed, Passes passes);

// Runs the case.
CaseDigests digest_case(const Case& test_case, uint64_t seed, Memory& memory,
                        Passes passes = Passes::kAll);

// As sixteen digits.
std::string hexadecimal(uint64_t hash);

}  // namespace tilemoe::verify
