// The calls by which files reach the disk and get their names, in order.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace tilemoe::train {

// The calls of `body`: "sync NAME BYTES" (of the file at that time) or "sync folder", "rename TO",
// "remove NAME". A program that is linked with this has fsync, rename and remove watched.
std::vector<std::string> calls_of(const std::function<void()>& body);

}  // namespace tilemoe::train
