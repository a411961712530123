// `tilemoe plot`: pictures of a training log, drawn by plot_log.py through matplotlib.
#pragma once

#include <filesystem>
#include <string>

namespace tilemoe::apps {

// Writes `<stem>-loss.png` and `<stem>-load.png` into `folder` (beside the log when empty) and
// prints their paths. Throws std::runtime_error saying what is missing: the log, Python, matplotlib
// (with the package to install), or the script.
void plot_log(const std::filesystem::path& log, const std::filesystem::path& folder,
              const std::string& format = "png");

}  // namespace tilemoe::apps
