// One call of the C interface under the fuzzer: its tensors in guarded regions, at most a few of
// its arguments spoiled, and the checks afterwards.
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

// A violated guarantee of the interface.
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

// State that outlives a call: regions, and the settings of values.
struct World {
  static constexpr size_t kRegionBytes = size_t{1} << 16;
  static constexpr size_t kRegions = 34;

  World();
  std::vector<std::unique_ptr<Region>> regions;
  std::unique_ptr<Region> workspace = std::make_unique<Region>(1);  // as large as was ever needed
  Region routing{kRegionBytes};
  Region sources{kRegionBytes};  // of sum_rows
  bool finite = true;            // whether every float of the calls is finite
  Statistics statistics;
};

// kMatrix: of the last two dimensions either is contiguous; kRows: the last one; kColumns: the
// other.
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
  // A way to spoil an argument that is not a tensor.
  void hazard(std::function<void()> spoil) { hazards_.push_back(std::move(spoil)); }
  // The call does not get the outputs in `part` of its arguments: nothing writes to them.
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

  // Spoils up to two arguments, calls and checks. Returns whether the call succeeded.
  bool run(const std::function<tilemoe_status()>& call);

 private:
  struct Entry {
    tilemoe_tensor* tensor;
    Region* region;
    bool is_output;
    bool aligned;
    int64_t low, high;
  };
  Region& next_region();
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
