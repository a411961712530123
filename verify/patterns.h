// Shell patterns of cases' names, as in the commands' arguments: a whole name, or the part before
// its dtype.
#pragma once

#include <fnmatch.h>

#include <algorithm>
#include <string>
#include <vector>

namespace tilemoe::verify {

inline bool matches(const std::string& pattern, const std::string& name) {
  const std::string without_dtype = name.substr(0, name.rfind('/'));
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0 ||
         fnmatch(pattern.c_str(), without_dtype.c_str(), 0) == 0;
}

// Without a pattern, every name.
inline bool matches_any(const std::vector<std::string>& patterns, const std::string& name) {
  return patterns.empty() || std::ranges::any_of(patterns, [&](const std::string& pattern) {
           return matches(pattern, name);
         });
}

// A sentence that names the pattern that matches none of the chosen cases, or nothing. name: a
// case's member or a function that gives its name; list: the command that lists all cases.
template <class Cases, class Name>
std::string no_match(const std::vector<std::string>& patterns, const Cases& chosen, Name name,
                     const std::string& list) {
  const std::string rest = "; `" + list + "` names them all";
  for (const std::string& pattern : patterns) {
    const auto fits = [&](const std::string& one) { return matches(pattern, one); };
    if (std::ranges::none_of(chosen, fits, name)) return "no case matches " + pattern + rest;
  }
  return chosen.empty() ? "no case matches" + rest : "";
}

}  // namespace tilemoe::verify
