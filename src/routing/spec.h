// The sizes of a routing: its capacity, the layout of the object in the caller's memory, the checks
// of both, and the layout of scratch.
#pragma once

#include "core/check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Writes the arrays of a routing of this kind, in the order of memory, and returns their number.
int32_t routing_layout(tilemoe_routing_kind kind, tilemoe_routing_array* arrays);

// Checks the spec and returns it in the layout of this version, with pairs and capacity filled in.
tilemoe_routing_spec complete(const tilemoe_routing_spec* spec);

// Bytes of the routing object's arrays. `spec` is complete.
size_t routing_bytes(const tilemoe_routing_spec& spec);

// Lays the arrays out in `memory`.
tilemoe_routing bind_routing(const tilemoe_routing_spec& spec, void* memory, size_t bytes);

// Fills a caller's struct.
void write_routing(const tilemoe_routing& routing, tilemoe_routing* to);

// The routing in the layout of this version, `spec` complete. Throws unless bind_routing made it.
tilemoe_routing read_routing(const tilemoe_routing* routing);

// Places consecutive arrays in a step's scratch; without memory it only measures.

class ScratchLayout {
 public:
  explicit ScratchLayout(void* base) : base_(static_cast<char*>(base)) {}

  template <class Element>
  Element* take(int64_t count) {
    char* place = base_ ? base_ + used_ : nullptr;
    const int64_t bytes = checked_product(count, sizeof(Element), "bytes of scratch");
    used_ += round_up(static_cast<size_t>(bytes), kAlignment);
    return reinterpret_cast<Element*>(place);
  }
  size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment =
      64;  // a cache line of the CPU, so that tasks do not share one
  char* base_;
  size_t used_ = 0;
};

}  // namespace tilemoe
