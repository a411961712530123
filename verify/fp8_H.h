// H of the fp8 recipe as codes and scales, in a device's memory (tilemoe_saved::H_codes).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"
#include "memory.h"

namespace tilemoe::verify {

class CodesOfH {
 public:
  // No memory unless the case saves codes.
  CodesOfH(const Case& test_case, int64_t capacity, Memory& memory);

  bool given() const { return given_; }
  Saved saved() const;
  void poison();
  // Gate columns, then up columns, of the values that backward reads.
  std::vector<float> read() const;
  // A hash of all bytes.
  uint64_t fingerprint() const { return codes_.fingerprint() ^ 3 * scales_.fingerprint(); }
  std::vector<std::string> damage() const;

 private:
  bool given_;
  DType dtype_;
  size_t rows_, n_;
  GuardedBuffer codes_, scales_;
};

}  // namespace tilemoe::verify
