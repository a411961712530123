// Zeros in the rows that no expert has.
#include <cstring>

#include "core/check.h"
#include "cpu/cpu_backend.h"

namespace tilemoe::cpu {

void clear_rest(const Rows& rows, const tilemoe_tensor& out, void*) {
  const int64_t M = rows.offsets[rows.E];
  const size_t row_bytes = static_cast<size_t>(out.stride[0]) * tilemoe_dtype_size(out.dtype);
  std::memset(static_cast<char*>(out.data) + static_cast<size_t>(M) * row_bytes, 0,
              static_cast<size_t>(rows.capacity - M) * row_bytes);
}

}  // namespace tilemoe::cpu
