// Shell patterns of cases' names, as the commands take them: all of a name, or what is before its
// dtype.
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

// What is wrong with patterns of which one matches none of these names, of the cases that were
// chosen: a sentence, or nothing. list: the command that names all cases.
inline std::string no_match(const std::vector<std::string>& patterns,
                            const std::vector<std::string>& names, const std::string& list) {
  for (const std::string& pattern : patterns)
    if (std::ranges::none_of(names,
                             [&](const std::string& name) { return matches(pattern, name); }))
      return "no case matches " + pattern + "; `" + list + "` names them all";
  return names.empty() ? "no case matches; `" + list + "` names them all" : "";
}

}  // namespace tilemoe::verify
