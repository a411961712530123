#include "cuda/two_cta.h"

#include <cstdlib>
#include <string_view>

#include "core/check.h"

namespace tilemoe::cuda::sm100 {

bool requests_2cta() {
  const char* const text = std::getenv("TILEMOE_2CTA");
  const std::string_view value = text ? text : "";
  TILEMOE_CHECK(value.empty() || value == "0" || value == "1",
                "TILEMOE_2CTA is '" << value << "', expected 0 or 1");
  return value == "1";
}

}  // namespace tilemoe::cuda::sm100
