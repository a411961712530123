#include <cstdint>
#include <vector>

#include "operators.h"

namespace tilemoe_torch {

void sum_rows(const std::vector<int64_t>& sources, int64_t source_rows, const Tensor& place,
              const MaybeTensor& addend, const Tensor& out) {
  const Call call({{"place", place}, {"addend", addend}, {"out", out}});
  std::vector<const void*> addresses;
  for (int64_t source : sources)
    addresses.push_back(reinterpret_cast<const void*>(static_cast<uintptr_t>(source)));
  tilemoe_sum_rows_args args{};
  args.struct_size = sizeof args;
  args.device = call.device();
  args.sources = narrowed<int32_t>("sources", static_cast<int64_t>(sources.size()));
  args.source = addresses.data();
  args.source_rows = source_rows;
  args.place = call.view("place", place);
  args.addend = call.view("addend", addend);
  args.out = call.view("out", out);
  args.stream = call.stream();
  check(tilemoe_sum_rows(&args));
}

}  // namespace tilemoe_torch
