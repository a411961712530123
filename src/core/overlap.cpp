#include "core/overlap.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/check.h"

namespace tilemoe {
namespace {

// Elements from a tensor's first to its last; 0 if it has none.
int64_t extent(const tilemoe_tensor& tensor) {
  int64_t last = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    if (tensor.shape[i] == 0) return 0;
    last += (tensor.shape[i] - 1) * tensor.stride[i];
  }
  return last + 1;
}

// A dimension of two views that have one stride there.
struct SharedDimension {
  int64_t stride;
  int64_t lowest, highest;  // index in one less index in the other
};

// Whether `distance` is a sum of strides times differences of indices. Strides descend, and each
// is more than those after it can reach: so a difference is the quotient, rounded down or up.
bool reaches(const SharedDimension* dimension, int count, int64_t distance) {
  if (count == 0) return distance == 0;
  int64_t down = distance / dimension->stride;
  if (down * dimension->stride > distance) --down;
  for (int64_t difference : {down, down + 1})
    if (difference >= dimension->lowest && difference <= dimension->highest &&
        reaches(dimension + 1, count - 1, distance - difference * dimension->stride))
      return true;
  return false;
}

// Exact for views with one dtype and the same strides; true for all others.
bool elements_meet(const tilemoe_tensor& a, const tilemoe_tensor& b) {
  if (a.dtype != b.dtype || a.ndim != b.ndim) return true;
  SharedDimension dimensions[TILEMOE_MAX_DIMS];
  int count = 0;
  for (int i = 0; i < a.ndim; ++i) {
    if (a.shape[i] == 1 && b.shape[i] == 1) continue;
    if (a.stride[i] != b.stride[i]) return true;
    dimensions[count++] = {a.stride[i], -(b.shape[i] - 1), a.shape[i] - 1};
  }
  for (int i = 1; i < count; ++i)  // by descending stride
    for (int j = i; j > 0 && dimensions[j].stride > dimensions[j - 1].stride; --j)
      std::swap(dimensions[j], dimensions[j - 1]);
  // Both are free of overlaps in themselves; what the smaller strides of either reach, a
  // difference of both may reach.
  int64_t reach = 0;
  for (int i = count - 1; i >= 0; --i) {
    if (reach >= dimensions[i].stride) return true;
    reach += std::max(-dimensions[i].lowest, dimensions[i].highest) * dimensions[i].stride;
  }
  const auto bytes = static_cast<int64_t>(reinterpret_cast<uintptr_t>(b.data) -
                                          reinterpret_cast<uintptr_t>(a.data));
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(a.dtype));
  return bytes % element != 0 || reaches(dimensions, count, bytes / element);
}

}  // namespace

bool same_view(const tilemoe_tensor& a, const tilemoe_tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (a.shape[i] != b.shape[i] || (a.shape[i] > 1 && a.stride[i] != b.stride[i])) return false;
  return true;
}

void MemoryUse::add(const Entry& entry) {
  if (entry.begin == entry.end) return;
  TILEMOE_ASSERT(count_ < kMaxArrays, "a call with more than " << kMaxArrays << " arrays");
  entries_[count_++] = entry;
}

void MemoryUse::add(const char* name, const char* except, const tilemoe_tensor& tensor,
                    bool written) {
  if (!present(tensor)) return;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data);
  const size_t bytes = static_cast<size_t>(extent(tensor)) * tilemoe_dtype_size(tensor.dtype);
  add({name, except, begin, begin + bytes, &tensor, written});
}

void MemoryUse::reads(const char* name, const tilemoe_tensor& tensor, const char* except) {
  add(name, except, tensor, false);
}
void MemoryUse::writes(const char* name, const tilemoe_tensor& tensor) {
  add(name, nullptr, tensor, true);
}
void MemoryUse::reads(const char* name, const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  add({name, nullptr, begin, begin + bytes, nullptr, false});
}
void MemoryUse::writes(const char* name, const void* memory, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  add({name, nullptr, begin, begin + bytes, nullptr, true});
}

bool MemoryUse::share_memory(const Entry& a, const Entry& b) {
  if (a.end <= b.begin || b.end <= a.begin) return false;
  return !a.tensor || !b.tensor || elements_meet(*a.tensor, *b.tensor);
}

void MemoryUse::check() const {
  const auto allows = [](const Entry& input, const Entry& output) {
    return input.except && std::strcmp(input.except, output.name) == 0;
  };
  for (const Entry* a = entries_; a != entries_ + count_; ++a)
    for (const Entry* b = entries_; b != a; ++b) {
      if (!(a->written || b->written) || allows(*a, *b) || allows(*b, *a)) continue;
      const auto [output, other] = a->written ? std::pair(a, b) : std::pair(b, a);
      TILEMOE_CHECK(!share_memory(*a, *b), output->name << " shares memory with " << other->name
                                                        << ", expected separate memory");
    }
}

}  // namespace tilemoe
