// The sizes of a routing, which no backend owns: capacity, the layout of the object in the caller's
// memory, and the checks of the arguments that build one.
#pragma once

#include "core/check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Checks the spec and returns it, as this version knows it, with pairs and capacity filled in.
tilemoe_routing_spec complete(const tilemoe_routing_spec* spec);

// Bytes of the routing object's arrays. `spec` is complete.
size_t routing_bytes(const tilemoe_routing_spec& spec);

// Lays the arrays out in `memory`.
tilemoe_routing bind_routing(const tilemoe_routing_spec& spec, void* memory, size_t bytes);

// Fills a caller's struct.
void write_routing(const tilemoe_routing& routing, tilemoe_routing* to);

// The routing as this version knows it, `spec` complete. Throws unless it came from bind_routing.
tilemoe_routing read_routing(const tilemoe_routing* routing);

// Hands out consecutive arrays of a step's scratch; without memory it only measures.

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
