#include "unknown_words.h"

#include <algorithm>
#include <cstddef>

namespace tilemoe::app {
namespace {

// Letters to add, remove, replace or swap with their neighbour that make `a` of `b`: the distance
// of optimal string alignment.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> distances(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        distances[i][j] = i + j;
        continue;
      }
      distances[i][j] = std::min({distances[i - 1][j] + 1, distances[i][j - 1] + 1,
                                  distances[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) distances[i][j] = std::min(distances[i][j], distances[i - 2][j - 2] + 1);
    }
  return distances[a.size()][b.size()];
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

std::string complaint(const std::string& kind, const std::string& word,
                      const std::vector<std::string>& known, const std::string& place) {
  const std::string meant = nearest(word, known);
  return "unknown " + kind + " " + word +
         (meant.empty() ? "; `" + place + " --help` lists them" : "; did you mean " + meant + "?");
}

}  // namespace

std::string nearest(std::string_view word, const std::vector<std::string>& known) {
  constexpr size_t kLettersASlip = 3;  // one slip per N letters
  constexpr size_t kLongest = 64;      // a name of a file, not of an option
  std::string best;
  size_t min_slips = std::min(word.size(), kLongest) / kLettersASlip + 1;
  for (const std::string& name : known) {
    if (word.size() > kLongest) break;
    const size_t slips = distance(word, name);
    if (slips >= min_slips) continue;
    min_slips = slips;
    best = name;
  }
  return best;
}

std::string complaint_of_command(const CLI::App& app, const std::string& word) {
  return complaint("command", word, command_names(app), "tilemoe");
}

bool has_unknown_command(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  return app.get_subcommands().empty() &&
         std::any_of(words.begin(), words.end(),
                     [](const std::string& word) { return !word.starts_with("-"); });
}

std::string complaint_of_unknown(const CLI::App& app) {
  const std::vector<CLI::App*> chosen = app.get_subcommands();
  const CLI::App& command = chosen.empty() ? app : *chosen.front();
  const std::vector<std::string> words = app.remaining(true);
  const std::string word = words.empty() ? "" : words.front().substr(0, words.front().find('='));
  const std::string place = chosen.empty() ? "tilemoe" : "tilemoe " + command.get_name();
  if (word.starts_with("-")) return complaint("option", word, option_names(command), place);
  if (chosen.empty()) return complaint_of_command(app, word);
  return complaint("argument", word, {}, place);
}

}  // namespace tilemoe::app
