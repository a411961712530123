#include "fuzz_call.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/numbers.h"

namespace tilemoe::fuzz {
namespace {

constexpr unsigned char kSentinel = 0xA5;

// Elements of a tensor whose extent fits its region, as offsets in bytes from its first.
void for_each_element(const tilemoe_tensor& tensor, const std::function<void(size_t)>& visit) {
  int64_t shape[TILEMOE_MAX_DIMS] = {1, 1, 1}, stride[TILEMOE_MAX_DIMS] = {};
  for (int i = 0; i < tensor.ndim; ++i) shape[i] = tensor.shape[i], stride[i] = tensor.stride[i];
  const size_t element = tilemoe_dtype_size(tensor.dtype);
  for (int64_t a = 0; a < shape[0]; ++a)
    for (int64_t b = 0; b < shape[1]; ++b)
      for (int64_t c = 0; c < shape[2]; ++c)
        visit(static_cast<size_t>(a * stride[0] + b * stride[1] + c * stride[2]) * element);
}

bool is_float(tilemoe_dtype dtype) {
  return dtype == TILEMOE_FLOAT32 || dtype == TILEMOE_BFLOAT16 || dtype == TILEMOE_FLOAT16;
}

// All exponent bits set: an infinity or a NaN.
bool is_finite(const unsigned char* at, tilemoe_dtype dtype) {
  if (dtype == TILEMOE_FLOAT32) {
    float value;
    std::memcpy(&value, at, sizeof value);
    return std::isfinite(value);
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  const uint16_t exponent = dtype == TILEMOE_BFLOAT16 ? 0x7f80 : 0x7c00;
  return (bits & exponent) != exponent;
}

}  // namespace

uint64_t Choices::word() {
  uint64_t value = 0;
  for (int i = 0; i < 2 && size_ > 0; ++i, ++data_, --size_) value = value << 8 | *data_;
  return value;
}

World::World() {
  for (size_t i = 0; i < kRegions; ++i) regions.push_back(std::make_unique<Region>(kRegionBytes));
}

void Call::fail(const std::string& what) const {
  throw Finding(std::string(name_) + ": " + what + " (last error: '" + tilemoe_last_error() + "')");
}

Region& Call::next_region() {
  if (entries_.size() == world_.regions.size()) throw std::logic_error("too few regions");
  return *world_.regions[entries_.size()];
}

void Call::lay_out(tilemoe_tensor& tensor, tilemoe_dtype dtype,
                   std::initializer_list<int64_t> shape, Layout layout, bool aligned) {
  tensor = {};
  tensor.dtype = dtype, tensor.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  int order[TILEMOE_MAX_DIMS] = {0, 1, 2};  // from the largest stride to the smallest
  const int last = tensor.ndim - 1;
  if (layout == Layout::kColumns || (layout == Layout::kMatrix && choices_.one_in(2)))
    std::swap(order[last], order[last - 1]);
  int64_t step = 1;
  for (int i = last; i >= 0; --i) {
    tensor.stride[order[i]] = step;
    step *= tensor.shape[order[i]];
    if (layout != Layout::kContiguous && choices_.one_in(3)) step += aligned ? 8 : 3;
    if (aligned) step = (step + 7) / 8 * 8;
  }
}

void Call::input(tilemoe_tensor& tensor, tilemoe_dtype dtype, std::initializer_list<int64_t> shape,
                 Layout layout, bool aligned, int64_t low, int64_t high) {
  Region& region = next_region();
  lay_out(tensor, dtype, shape, layout, aligned);
  entries_.push_back({&tensor, &region, false, aligned, low, high});
}

void Call::output(tilemoe_tensor& tensor, tilemoe_dtype dtype, std::initializer_list<int64_t> shape,
                  Layout layout, bool aligned) {
  Region& region = next_region();
  lay_out(tensor, dtype, shape, layout, aligned);
  entries_.push_back({&tensor, &region, true, aligned, 0, 0});
}

void Call::workspace(void*& pointer, size_t& bytes, size_t needed) {
  if (needed > world_.workspace->bytes()) world_.workspace = std::make_unique<Region>(needed);
  workspace_pointer_ = &pointer, workspace_bytes_ = &bytes, needed_ = needed;
  bytes = needed;
  pointer = world_.workspace->place(needed, 16, choices_.one_in(2));
  hazard([this] {
    *workspace_bytes_ = static_cast<size_t>(choices_.below(static_cast<int64_t>(needed_)));
  });
  hazard([this] { *workspace_pointer_ = nullptr; });
  // As a number, since it may be null already; applied twice it is not on 16 bytes either.
  hazard([this] {
    const auto address = reinterpret_cast<uintptr_t>(*workspace_pointer_) / 16 * 16;
    *workspace_pointer_ =
        reinterpret_cast<void*>(address + static_cast<uintptr_t>(choices_.between(1, 15)));
  });
}

// One field of a tensor. Sizes and strides are near the right ones, or so far off that no memory
// could hold what they describe.
void Call::spoil_tensor(tilemoe_tensor& tensor) {
  const int dim = static_cast<int>(choices_.below(TILEMOE_MAX_DIMS));
  int64_t& size = tensor.shape[dim];
  int64_t& stride = tensor.stride[dim];
  const auto small = [](int64_t value) { return std::clamp<int64_t>(value, -4096, 4096); };
  const int64_t near_size = small(size), near_stride = small(stride);
  switch (choices_.below(6)) {
    case 0: tensor.dtype = static_cast<tilemoe_dtype>(choices_.between(-1, 6)); break;
    case 1: tensor.ndim = choices_.pick<int32_t>({0, 1, 2, 3, 4, -1, INT32_MAX, INT32_MIN}); break;
    case 2:
      size =
          choices_.pick<int64_t>({0, 1, 2, near_size - 1, near_size + 1, -1, INT64_MAX, INT64_MIN});
      break;
    case 3:
      stride = choices_.pick<int64_t>({0, 1, 2, near_stride - 1, near_stride + 1, near_stride + 8,
                                       2 * near_stride, -1, -near_stride, int64_t{1} << 62,
                                       INT64_MAX, INT64_MIN});
      break;
    case 4: tensor = {}; break;
    default: std::swap(tensor.shape[0], tensor.shape[1]); break;
  }
}

void Call::place(Entry& entry) {
  tilemoe_tensor& tensor = *entry.tensor;
  if (tensor.ndim == 0) return;  // absent
  const size_t bytes = extent(tensor, entry.region->bytes());
  const bool fits = bytes != SIZE_MAX;
  const size_t element = std::max<size_t>(tilemoe_dtype_size(tensor.dtype), 1);
  tensor.data = entry.region->place(fits ? bytes : 0, entry.aligned ? 16 : element,
                                    fits && choices_.one_in(2));
  std::memset(entry.region->begin(), kSentinel, entry.region->bytes());
  if (fits && bytes > 0) fill(entry, bytes);
}

void Call::fill(const Entry& entry, size_t bytes) {
  const tilemoe_tensor& tensor = *entry.tensor;
  auto* const data = static_cast<unsigned char*>(tensor.data);
  uint64_t state = choices_.word() * 2 + 1;
  const auto next = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 33;
  };
  for_each_element(tensor, [&](size_t at) {
    if (at >= bytes) throw std::logic_error("an element past its tensor's extent");
    const uint64_t random = next();
    if (is_float(tensor.dtype)) {
      float value = static_cast<float>(static_cast<int64_t>(random % 17) - 8) / 8;
      if (!world_.finite && random % 5 == 0) {
        const float limits[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, -0.f};
        value = limits[random / 5 % 7];
      }
      if (tensor.dtype == TILEMOE_FLOAT32) {
        std::memcpy(data + at, &value, sizeof value);
      } else {
        BFloat16 bfloat16;
        Float16 float16;
        store(value, bfloat16), store(value, float16);
        const uint16_t bits = tensor.dtype == TILEMOE_BFLOAT16 ? bfloat16.bits : float16.bits;
        std::memcpy(data + at, &bits, sizeof bits);
      }
      return;
    }
    const auto range = static_cast<uint64_t>(entry.high - entry.low + 1);
    int64_t value = entry.low + static_cast<int64_t>(random % range);
    if (random % 97 == 0) value = random % 2 ? INT64_MAX : INT64_MIN;
    if (tensor.dtype == TILEMOE_INT32) {
      const auto narrow = static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
      std::memcpy(data + at, &narrow, sizeof narrow);
    } else {
      std::memcpy(data + at, &value, sizeof value);
    }
  });
}

bool Call::run(const std::function<tilemoe_status()>& call) {
  const int64_t spoils = choices_.one_in(2) ? choices_.between(1, 2) : 0;
  for (int64_t i = 0; i < spoils; ++i) {
    const auto which = static_cast<size_t>(
        choices_.below(static_cast<int64_t>(entries_.size() + hazards_.size())));
    if (which < entries_.size())
      spoil_tensor(*entries_[which].tensor);
    else
      hazards_[which - entries_.size()]();
  }
  for (Entry& entry : entries_) place(entry);
  if (spoils > 0 && choices_.one_in(8)) {  // a pointer off by less than an alignment, or null
    tilemoe_tensor& tensor =
        *entries_[static_cast<size_t>(choices_.below(static_cast<int64_t>(entries_.size())))]
             .tensor;
    if (tensor.data)
      tensor.data = choices_.one_in(2) ? nullptr : static_cast<unsigned char*>(tensor.data) - 1;
  }
  for (Entry& entry : entries_) entry.region->remember();
  world_.workspace->remember();
  world_.routing.remember();

  const tilemoe_status status = call();
  if (status != TILEMOE_SUCCESS) {
    check_refused(status, spoils > 0);
    ++world_.statistics.refused;
    return false;
  }
  check_done();
  ++world_.statistics.succeeded;
  return true;
}

void Call::check_refused(tilemoe_status status, bool spoiled) const {
  if (!spoiled) fail("refused arguments that are right");
  if (status != TILEMOE_INVALID_ARGUMENT && status != TILEMOE_UNSUPPORTED)
    fail("answered " + std::string(tilemoe_status_name(status)));
  if (std::strlen(tilemoe_last_error()) == 0) fail("refused without a word");
  for (const Entry& entry : entries_)
    if (!entry.region->unchanged()) fail("wrote, though it refused");
  if (!world_.workspace->unchanged()) fail("wrote to the workspace, though it refused");
  if (!world_.routing.unchanged()) fail("wrote to the routing, though it refused");
}

void Call::check_done() const {
  if (std::strlen(tilemoe_last_error()) != 0) fail("left an error after a success");
  for (const Entry& entry : entries_) {
    if (entry.is_output)
      check_output(entry);
    else if (!entry.region->unchanged())
      fail("wrote to an input");
  }
  if (!builds_routing_ && !world_.routing.unchanged()) fail("wrote to the routing");
  size_t start = 0, size = 0;
  if (workspace_pointer_ && *workspace_pointer_) {
    start = static_cast<size_t>(static_cast<unsigned char*>(*workspace_pointer_) -
                                world_.workspace->begin());
    size = *workspace_bytes_;
  }
  if (!world_.workspace->unchanged(0, start) ||
      !world_.workspace->unchanged(start + size, world_.workspace->bytes()))
    fail("wrote outside the workspace");
}

void Call::check_output(const Entry& entry) const {
  const tilemoe_tensor& tensor = *entry.tensor;
  const Region& region = *entry.region;
  std::vector<bool> addressed(region.bytes(), false);
  if (tensor.ndim != 0) {
    const size_t bytes = extent(tensor, region.bytes());
    if (bytes == SIZE_MAX) fail("took a tensor that no memory holds");
    const auto start =
        static_cast<size_t>(static_cast<unsigned char*>(tensor.data) - region.begin());
    if (bytes > 0)
      for_each_element(tensor, [&](size_t at) {
        for (size_t i = 0; i < tilemoe_dtype_size(tensor.dtype); ++i)
          addressed[start + at + i] = true;
        if (world_.finite && finite_outputs_ && is_float(tensor.dtype) &&
            !is_finite(region.begin() + start + at, tensor.dtype))
          fail("wrote a number that is not finite, from finite ones");
      });
  }
  for (size_t at = 0; at < region.bytes(); ++at)
    if (!addressed[at] && !region.unchanged(at, at + 1)) fail("wrote outside an output's elements");
}

}  // namespace tilemoe::fuzz
