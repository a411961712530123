// `tilemoe plot`: pictures of a training log. Python and matplotlib draw them, by the script
// plot_log.py which is embedded in this program, so it needs no file next to it.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "commands.h"
#include "plot_script.h"
#include "train/file.h"

extern char** environ;  // POSIX has it in no header

namespace tilemoe::app {
namespace {

constexpr char kInstall[] =
    "plotting requires Python with matplotlib; install it with `sudo apt-get install -y "
    "python3-matplotlib`";

struct PlotOptions {
  std::string log;
  std::string folder;
  std::string format = "png";
  std::string python;
};

// The exit status of `arguments`, the first searched for in PATH; -1 if no such
// program exists.
int run_program(std::vector<std::string> arguments) {
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  pid_t child = 0;
  if (::posix_spawnp(&child, pointers[0], nullptr, nullptr, pointers.data(), environ) != 0)
    return -1;
  int status = 0;
  while (::waitpid(child, &status, 0) < 0)
    if (errno != EINTR) throw std::runtime_error("cannot wait for " + arguments[0]);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

// A way to start a Python. None has the current folder on its path: a json.py next to the log
// is nobody's module. Isolated, Python looks into its own folders alone; if matplotlib is only in
// the user's (PYTHONPATH, ~/.local) it may look there, too, and the script drops the
// current folder itself.
using Python = std::vector<std::string>;

bool has_matplotlib(Python python) {
  python.insert(python.end(), {"-c",
                               "import sys; sys.path = [path for path in sys.path if path]\n"
                               "from importlib import machinery\n"
                               "sys.exit(machinery.PathFinder.find_spec('matplotlib') is None)"});
  return run_program(std::move(python)) == 0;
}

// The user's Python may not be the one that the package belongs to, so that one is tried, too.
Python python_with_matplotlib(const std::string& chosen) {
  const std::vector<std::string> programs =
      chosen.empty() ? std::vector<std::string>{"python3", "/usr/bin/python3"}
                     : std::vector<std::string>{chosen};
  for (const std::string& program : programs)
    for (Python python : {Python{program, "-I"}, Python{program}})
      if (has_matplotlib(python)) return python;
  throw std::runtime_error((chosen.empty() ? "" : "--python " + chosen + " has no matplotlib; ") +
                           kInstall);
}

int plot(PlotOptions options) {
  if (std::filesystem::is_directory(options.log))
    options.log = std::filesystem::path(options.log) / "log.jsonl";
  train::File(options.log, O_RDONLY, "read");  // missing, it is what the user wants to know first
  Python arguments = python_with_matplotlib(options.python);
  arguments.insert(arguments.end(), {"-c", kPlotScript, "--format=" + options.format});
  if (!options.folder.empty()) arguments.push_back("--out=" + options.folder);
  arguments.insert(arguments.end(), {"--", options.log});
  const std::string program = arguments.front();
  const int status = run_program(std::move(arguments));
  if (status < 0) throw std::runtime_error("cannot run " + program + "; " + kInstall);
  return status == 0 ? 0 : 1;
}

}  // namespace

void add_plot(CLI::App& app, Run& run) {
  CLI::App* command = app.add_subcommand("plot", "Plot the loss and the expert load of a run");
  auto options = std::make_shared<PlotOptions>();
  command->add_option("log", options->log, "Folder of a run, or its log.jsonl")->required();
  command->add_option("--out", options->folder, "Folder of the pictures (default: the log's)");
  command->add_option("--format", options->format, "Format of the pictures")
      ->check(CLI::IsMember({"png", "svg", "pdf"}))
      ->capture_default_str();
  command->add_option("--python", options->python, "Python with matplotlib (default: python3)");
  command->callback([options, &run] { run = [options] { return plot(*options); }; });
}

}  // namespace tilemoe::app
