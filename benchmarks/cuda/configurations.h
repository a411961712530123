// Whether the cost model picks the fastest tile: every tile that a projection has, in turn with the
// others, on many shapes; and what the order of tiles and early launches are worth.
#pragma once

#include <string>
#include <vector>

namespace tilemoe {

// Of the configurations of these names, all without any. Prints a line a comparison, and writes the
// numbers to `json_file` unless it is empty. False where a pick is over 3 % slower than the best.
bool compare_configurations(const std::vector<std::string>& names, const std::string& json_file);

}  // namespace tilemoe
