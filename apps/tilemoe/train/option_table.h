// Options of a command that are also its configuration: each is known to the command line, to the
// checkpoint and to the log by one name.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace tilemoe::train {

class OptionTable {
 public:
  explicit OptionTable(CLI::App& command) : command_(command) {}

  // Adds "--name" to the command line. `value` holds the default and takes what is given; it must
  // outlive the table.
  template <class Value>
  CLI::Option* add(const std::string& name, Value& value, const std::string& help) {
    CLI::Option* option;
    if constexpr (std::is_same_v<Value, bool>)
      option = command_.add_flag("--" + name, value, help);
    else
      option = command_.add_option("--" + name, value, help)->capture_default_str();
    entries_.push_back({name, option, [&value] { return nlohmann::json(value); },
                        [&value](const nlohmann::json& saved) { take(saved, value); }});
    return option;
  }

  // Also reads "--older", with a warning, and saved values of that name. Not listed in the help.
  template <class Value>
  void add_older_name(const std::string& name, const std::string& older, Value& value) {
    Entry& entry = entry_of(name);
    const auto read = [name, older, &value](const Value& given) {
      std::cerr << "tilemoe: warning: --" << older << " is the older name of --" << name << "\n";
      value = given;
    };
    entry.older = older;
    entry.older_option =
        command_.add_option_function<Value>("--" + older, read, "Older name of --" + name)
            ->group("")
            ->excludes(entry.option);
  }

  // Saved values under their present names.
  nlohmann::json with_present_names(nlohmann::json saved) const {
    for (const Entry& entry : entries_) {
      if (entry.older.empty() || !saved.contains(entry.older)) continue;
      if (!saved.contains(entry.name)) saved[entry.name] = saved[entry.older];
      saved.erase(entry.older);
    }
    return saved;
  }

  // {"name": value, ...}
  nlohmann::json to_json() const {
    nlohmann::json values = nlohmann::json::object();
    for (const Entry& entry : entries_) values[entry.name] = entry.read();
    return values;
  }

  // Whether the command line gives the option of that name.
  bool is_given(const std::string& name) const {
    for (const Entry& entry : entries_)
      if (entry.name == name) return entry.is_given();
    return false;
  }

  // Options that the command line does not give take the values saved. Throws std::runtime_error
  // if one is of another type.
  void take_missing(const nlohmann::json& saved) {
    const nlohmann::json values = with_present_names(saved);
    for (Entry& entry : entries_) {
      if (entry.is_given() || !values.contains(entry.name)) continue;
      try {
        entry.write(values.at(entry.name));
      } catch (const std::exception&) {
        throw std::runtime_error("the saved value of --" + entry.name +
                                 " is invalid: " + values.at(entry.name).dump());
      }
    }
  }

 private:
  struct Entry {
    std::string name;
    CLI::Option* option;
    std::function<nlohmann::json()> read;
    std::function<void(const nlohmann::json&)> write;
    std::string older = {};
    CLI::Option* older_option = nullptr;

    bool is_given() const {
      return option->count() > 0 || (older_option && older_option->count() > 0);
    }
  };

  Entry& entry_of(const std::string& name) {
    for (Entry& entry : entries_)
      if (entry.name == name) return entry;
    throw std::logic_error("no option --" + name);
  }

  // A whole number is never taken from one that it does not hold: nlohmann would convert it.
  template <class Value>
  static void take(const nlohmann::json& saved, Value& value) {
    if constexpr (std::is_same_v<Value, int64_t>) {
      const bool whole = saved.is_number_integer() &&
                         !(saved.is_number_unsigned() && saved.get<uint64_t>() > INT64_MAX);
      if (!whole) throw std::runtime_error(saved.dump());
    }
    saved.get_to(value);
  }

  CLI::App& command_;
  std::vector<Entry> entries_;
};

}  // namespace tilemoe::train
