// `tilemoe`: the command line. Exit status: 0 done, 1 failed or found wanting, 2 wrong usage.
#include <exception>
#include <iostream>
#include <new>

#include "commands.h"
#include "strict_numbers.h"
#include "tilemoe/tilemoe.h"

namespace {

constexpr int kFailed = 1;
constexpr int kWrongUsage = 2;

int fail(const char* reason) {
  std::cerr << "tilemoe: error: " << reason << "\n";
  return kFailed;
}

int refuse(const char* reason) {
  std::cerr << "tilemoe: error: " << reason << "\nRun with --help for the options.\n";
  return kWrongUsage;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace tilemoe::app;
  CLI::App app("TileMoE: the Mixture-of-Experts layer, forward and backward.", "tilemoe");
  app.set_version_flag("--version", std::string("tilemoe ") + tilemoe_version());
  app.require_subcommand(0, 1);
  app.failure_message(CLI::FailureMessage::help);
  app.get_formatter()->column_width(34);

  Run run;
  add_bench(app, run);
  add_check(app, run);
  add_info(app, run);
  add_plot(app, run);
  add_train(app, run);
  require_strict_numbers(app);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const bool asked_for_help = error.get_exit_code() == 0;
    return asked_for_help ? app.exit(error) : refuse(error.what());
  }
  if (!run) return refuse("a subcommand is required");
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return fail("out of memory");
  } catch (const std::exception& error) {
    return fail(error.what());
  }
}
