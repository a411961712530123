// `tilemoe plot`: pictures of a training log. Python and matplotlib draw them, by the script
// plot_log.py which this program carries in itself, so it needs no file of its own beside it.
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "commands.h"
#include "plot_script.h"

extern char** environ;  // POSIX has it in no header

namespace tilemoe::app {
namespace {

struct PlotOptions {
  std::string log;
  std::string folder;
  std::string format = "png";
  std::string python = "python3";
};

// The exit status of `arguments`, searched for in PATH.
int run_program(std::vector<std::string> arguments) {
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, pointers[0], nullptr, nullptr, pointers.data(), environ);
  if (error != 0)
    throw std::runtime_error("cannot run " + arguments[0] + ": " +
                             std::generic_category().message(error) +
                             "\nPictures take Python and matplotlib. Install them with\n"
                             "  sudo apt-get install -y python3-matplotlib");
  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR) throw std::runtime_error("cannot wait for " + arguments[0]);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int plot(const PlotOptions& options) {
  std::vector<std::string> arguments = {options.python, "-c",       kPlotScript,
                                        options.log,    "--format", options.format};
  if (!options.folder.empty()) arguments.insert(arguments.end(), {"--out", options.folder});
  return run_program(std::move(arguments)) == 0 ? 0 : 1;
}

}  // namespace

void add_plot(CLI::App& app, Run& run) {
  CLI::App* command =
      app.add_subcommand("plot", "Draw the loss and the experts' load of a training");
  auto options = std::make_shared<PlotOptions>();
  command->add_option("log", options->log, "The log of `tilemoe train`, LOG.jsonl")->required();
  command->add_option("--out", options->folder, "Folder of the pictures (default: the log's)");
  command->add_option("--format", options->format, "Of the pictures")
      ->check(CLI::IsMember({"png", "svg", "pdf"}))
      ->capture_default_str();
  command->add_option("--python", options->python, "A Python that has matplotlib")
      ->capture_default_str();
  command->callback([options, &run] { run = [options] { return plot(*options); }; });
}

}  // namespace tilemoe::app
