// The subcommands of `tilemoe`. Each function adds one to the command line; parsing the arguments
// puts what the chosen subcommand does into `run`, which main calls afterwards. `run` returns the
// exit status (exit_status.h); it throws std::exception with one clear sentence if the work
// cannot be done, WrongUsage if the command line is wrong.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace tilemoe::app {

using Run = std::function<int()>;

void add_check(CLI::App& app, Run& run);
void add_digest(CLI::App& app, Run& run);
void add_doctor(CLI::App& app, Run& run);
void add_generate(CLI::App& app, Run& run);
void add_info(CLI::App& app, Run& run);
void add_plot(CLI::App& app, Run& run);
void add_train(CLI::App& app, Run& run);

}  // namespace tilemoe::app
