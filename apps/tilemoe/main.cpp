// `tilemoe`: the command line. How it ends is in exit_status.h.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iostream>
#include <memory>
#include <new>
#include <string>

#include "commands.h"
#include "device.h"
#include "exit_status.h"
#include "strict_numbers.h"
#include "tilemoe/error.h"
#include "tilemoe/tilemoe.h"
#include "unknown_words.h"

namespace {

using namespace tilemoe::app;

int fail(int status, const std::string& reason) {
  std::cerr << "tilemoe: error: " << reason << "\n";
  return status;
}

void add_help(CLI::App& app, Run& run) {
  CLI::App* const help = app.add_subcommand("help", "Print this help, or the help of a command");
  const auto name = std::make_shared<std::string>();
  help->add_option("command", *name, "Name of a command");
  help->callback([&app, &run, name] {
    run = [&app, name] {
      const auto named = [&](const CLI::App* command) { return command->get_name() == *name; };
      const auto found = app.get_subcommands(named);
      if (!name->empty() && found.empty()) throw WrongUsage(complaint_of_command(app, *name));
      // app.help() would print the help of the chosen command, which is this one.
      std::cout << (name->empty() ? app.get_formatter()->make_help(&app, app.get_name(),
                                                                   CLI::AppFormatMode::Normal)
                                  : found.front()->help(app.get_name()));
      return kDone;
    };
  });
}

int parse_and_run(CLI::App& app, const Run& run, int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "bench") == 0)
    return fail(
        kWrongUsage,
        "`tilemoe bench` was removed; `python -m tilemoe bench` compares the layer with other "
        "implementations, `tilemoe_kernels` times its kernels");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) {
    return fail(kWrongUsage, complaint_of_unknown(app));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return fail(kWrongUsage, error.what());
    // Help or the version, but not in the place of a command that does not exist.
    return has_unknown_command(app) ? fail(kWrongUsage, complaint_of_unknown(app))
                                    : app.exit(error);
  }
  if (!run) return fail(kWrongUsage, "a command is required; `tilemoe --help` lists them");
  try {
    return run();
  } catch (const WrongUsage& error) {
    return fail(kWrongUsage, error.what());
  } catch (const tilemoe::Error& error) {
    return fail(kFailed, in_words(error.what()));
  } catch (const std::bad_alloc&) {
    return fail(kFailed, "out of memory");
  } catch (const std::exception& error) {
    return fail(kFailed, error.what());
  }
}

// The output may still lie in a buffer, and the device be full.
int with_output_written(int status) {
  errno = 0;
  std::cout.flush();
  const bool flushed = std::fflush(stdout) == 0;
  const std::string reason = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
  if (status != kDone || (flushed && std::cout && std::ferror(stdout) == 0)) return status;
  return fail(kFailed, "cannot write the output" + reason);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("TileMoE: the Mixture-of-Experts layer, forward and backward.", "tilemoe");
  app.set_version_flag("-v,--version", std::string("tilemoe ") + tilemoe_version());
  app.require_subcommand(0, 1);
  app.get_formatter()->column_width(34);

  Run run;
  add_check(app, run);
  add_digest(app, run);
  add_doctor(app, run);
  add_generate(app, run);
  add_help(app, run);
  add_info(app, run);
  add_plot(app, run);
  add_train(app, run);
  app.footer(kExitStatusHelp);  // after the commands, which would inherit it
  require_strict_numbers(app);
  return with_output_written(parse_and_run(app, run, argc, argv));
}
