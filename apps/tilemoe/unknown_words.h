// Words that the command line does not know, and which known one may be meant.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tilemoe::app {

// The one of `known` that a slip of the keys may have made `word` of; empty if none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& known);

// One sentence about the first word that `app` or the chosen subcommand has found no use for.
std::string complaint_of_unknown(const CLI::App& app);

// The same about `word`, in the place of a command of `app`.
std::string complaint_of_command(const CLI::App& app, const std::string& word);

// Whether `app` received a word in the place of a command, and no command.
bool has_unknown_command(const CLI::App& app);

}  // namespace tilemoe::app
