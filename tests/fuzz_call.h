// One call of the C interface under the fuzzer: its tensors in guarded slabs, at most a few of its
// arguments spoiled, and what must hold afterwards whatever they were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fuzz_memory.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::fuzz {

// A broken promise of the interface.
struct Finding : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The fuzzer's bytes as choices; every choice is 0 once they are used up.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return size_ == 0; }
  int64_t below(int64_t count) {
    return count <= 1 ? 0 : static_cast<int64_t>(word() % static_cast<uint64_t>(count));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t count) { return below(count) == count - 1; }
  template <class Value>
  Value pick(std::initializer_list<Value> values) {
    return values.begin()[below(static_cast<int64_t>(values.size()))];
  }
  uint64_t word();

 private:
  const uint8_t* data_;
  size_t size_;
};

struct Statistics {
  int64_t sizes = 0, succeeded = 0, refused = 0;
};

// What outlives a call: slabs, and how values are made.
struct World {
  static constexpr size_t kSlabBytes = size_t{1} << 16;
  static constexpr size_t kSlabs = 26;

  World();
  std::vector<std::unique_ptr<Slab>> slabs;
  std::unique_ptr<Slab> workspace = std::make_unique<Slab>(1);  // as large as was ever needed
  Slab routing{kSlabBytes};
  Slab sources{kSlabBytes};  // of sum_rows
  bool finite = true;        // of every float that calls are given
  Statistics statistics;
};

// kMatrix: of the last two dimensions either is contiguous; kRows: the last one; kColumns: the other.
enum class Layout { kContiguous, kRows, kColumns, kMatrix };

class Call {
 public:
  Call(World& world, Choices& choices, const char* name)
      : world_(world), choices_(choices), name_(name) {}

  // Lays out a tensor of that shape, with the paddings and the major that `layout` allows. Integers
  // lie in [low, high], now and then far outside.
  void input(tilemoe_tensor& tensor, tilemoe_dtype dtype, std::initializer_list<int64_t> shape,
             Layout layout = Layout::kContiguous, bool aligned = false, int64_t low = 0,
             int64_t high = 0);
  void output(tilemoe_tensor& tensor, tilemoe_dtype dtype, std::initializer_list<int64_t> shape,
              Layout layout = Layout::kContiguous, bool aligned = false);
  void workspace(void*& pointer, size_t& bytes, size_t needed);
  // A way to spoil what is not a tensor.
  void hazard(std::function<void()> spoil) { hazards_.push_back(std::move(spoil)); }
  // The call is not given the outputs in `part` of its arguments: nobody writes to them.
  template <class Part>
  void withdraw(const Part& part) {
    for (Entry& entry : entries_) {
      const void* const tensor = entry.tensor;
      if (std::greater_equal<const void*>()(tensor, &part) &&
          std::less<const void*>()(tensor, &part + 1))
        entry.is_output = false;
    }
  }
  // The call writes the routing's arrays.
  void builds_routing() { builds_routing_ = true; }
  // Outputs of these inputs need not be finite.
  void may_overflow() { finite_outputs_ = false; }

  // Spoils up to two arguments, calls and checks. True where the call succeeded.
  bool run(const std::function<tilemoe_status()>& call);

 private:
  struct Entry {
    tilemoe_tensor* tensor;
    Slab* slab;
    bool is_output;
    bool aligned;
    int64_t low, high;
  };
  Slab& next_slab();
  void lay_out(tilemoe_tensor& tensor, tilemoe_dtype dtype, std::initializer_list<int64_t> shape,
               Layout layout, bool aligned);
  void spoil_tensor(tilemoe_tensor& tensor);
  void place(Entry& entry);
  void fill(const Entry& entry, size_t bytes);
  void check_refused(tilemoe_status status, bool spoiled) const;
  void check_done() const;
  void check_output(const Entry& entry) const;
  [[noreturn]] void fail(const std::string& what) const;

  World& world_;
  Choices& choices_;
  const char* name_;
  std::vector<Entry> entries_;
  std::vector<std::function<void()>> hazards_;
  void** workspace_pointer_ = nullptr;
  size_t* workspace_bytes_ = nullptr;
  size_t needed_ = 0;
  bool builds_routing_ = false;
  bool finite_outputs_ = true;
};

// Drives the whole interface by the bytes; throws Finding.
void fuzz(World& world, const uint8_t* data, size_t size);

}  // namespace tilemoe::fuzz
