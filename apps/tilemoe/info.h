// The output of `tilemoe info`, for other commands.
#pragma once

#include <iosfwd>
#include <nlohmann/json.hpp>

namespace tilemoe::app {

nlohmann::json info();
void print_info(const nlohmann::json& info, std::ostream& out);

}  // namespace tilemoe::app
