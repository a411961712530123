#include "cuda/two_cta.h"

#include <string_view>

#include "core/check.h"

namespace tilemoe::cuda::sm100 {

bool requests_2cta(const char* variable) {
  const std::string_view value = variable ? variable : "";
  TILEMOE_CHECK(value.empty() || value == "0" || value == "1",
                "TILEMOE_2CTA is '" << value << "', expected 0 or 1");
  return value == "1";
}

}  // namespace tilemoe::cuda::sm100
