#include "parts.h"

#include <algorithm>

namespace tilemoe::verify {
namespace {

std::vector<int32_t> host_copy(Memory& memory, const int32_t* from, int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  memory.copy_out(values.data(), from, values.size() * sizeof(int32_t));
  return values;
}

}  // namespace

Parts::Parts(const Routing& routing, const std::vector<int64_t>& cuts, Memory& memory)
    : bounds_(memory, cuts.size() * static_cast<size_t>(routing.spec.E) * sizeof(int32_t)) {
  const int64_t E = routing.spec.E;
  const std::vector<int32_t> offsets = host_copy(memory, routing.offsets, E + 1);
  const std::vector<int32_t> token = host_copy(memory, routing.row_token, offsets.back());
  std::vector<int32_t> bounds;
  for (const int64_t cut : cuts)
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const auto first = token.begin() + offsets[e], last = token.begin() + offsets[e + 1];
      bounds.push_back(static_cast<int32_t>(std::lower_bound(first, last, cut) - token.begin()));
    }
  memory.copy_in(bounds_.data(), bounds.data(), bounds_.bytes());
  const auto* at = static_cast<const int32_t*>(bounds_.data());
  for (size_t part = 0; part + 1 < cuts.size(); ++part, at += E)
    parts_.push_back({.struct_size = sizeof(tilemoe_part),
                      .begins = at,
                      .ends = at + E,
                      .first_token = cuts[part],
                      .tokens = cuts[part + 1] - cuts[part],
                      .last = 0,
                      .reserved = 0});
}

std::vector<tilemoe_part> Parts::in_order(std::initializer_list<size_t> order) const {
  std::vector<tilemoe_part> parts;
  for (const size_t part : order) parts.push_back(parts_[part]);
  parts.back().last = 1;
  return parts;
}

}  // namespace tilemoe::verify
