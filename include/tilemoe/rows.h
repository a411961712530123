// Sums of rows of several arrays in C++. Semantics, shapes and errors are documented at the function
// of the same name in tilemoe.h; a call throws tilemoe::Error on a bad argument.
#pragma once

#include <cstdint>

#include "tilemoe/tensor.h"

namespace tilemoe {

// place (rows, P) int32: row r of source s is s * source_rows + r, any other number is no row.
struct SumRows {
  Required<Device> device;
  const void* const* source = nullptr;  // (sources), each (source_rows, d) of out's dtype
  int32_t sources = 0;
  int64_t source_rows = 0;
  ConstTensor place;
  ConstTensor addend = {};  // (rows, d); may be out; optional
  Tensor out;               // (rows, d)
  void* stream = nullptr;
};
inline void sum_rows(const SumRows& given) {
  tilemoe_sum_rows_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.sources = given.sources, args.source = given.source;
  args.source_rows = given.source_rows;
  args.place = given.place, args.addend = given.addend, args.out = given.out;
  args.stream = given.stream;
  check(tilemoe_sum_rows(&args));
}

}  // namespace tilemoe
