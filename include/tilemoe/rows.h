/// @file
/// Sums of rows of several arrays in C++. tilemoe_sum_rows() documents semantics, shapes and
/// errors; a call throws tilemoe::Error on a bad argument.
#pragma once

#include <cstdint>

#include "tilemoe/tensor.h"

namespace tilemoe {

/// Arguments of sum_rows().
struct SumRows {
  Required<Device> device;              ///< device of `place`, `addend` and `out`
  const void* const* source = nullptr;  ///< (sources), each (source_rows, d) of out's dtype
  int32_t sources = 0;                  ///< number of sources
  int64_t source_rows = 0;              ///< rows of a source
  /// (rows, P) int32: row r of source s is `s * source_rows + r`; any other number is not a row
  ConstTensor place;
  ConstTensor addend = {};  ///< (rows, d) out's dtype; may be `out`; optional
  Tensor out;               ///< (rows, d) float32 (CPU), bfloat16 or float16
  void* stream = nullptr;   ///< cudaStream_t
};
/// Sums rows of several arrays, see tilemoe_sum_rows().
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
