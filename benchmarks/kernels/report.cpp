#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <stdexcept>

#include "commit.h"
#include "output_file.h"
#include "table.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::app {
namespace {

// Five significant digits, as records.py keeps.
double shortened(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.5g", value);
  return std::strtod(text, nullptr);
}

void shorten(Values& value) {
  if (value.is_number_float()) value = shortened(value.get<double>());
  if (value.is_structured())
    for (Values& one : value) shorten(one);
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name"))
      if (const size_t colon = line.find(": "); colon != std::string::npos)
        return line.substr(colon + 2);
  return "unknown";
}

// The name without the part that the table's title has.
std::string last_part(const std::string& name) {
  return name.substr(name.rfind('/') + 1);
}

std::string number(double value) {
  return value < 1 ? fixed(value, 4) : fixed(value, value < 100 ? 3 : 1);
}

}  // namespace

double Limits::ms(const Work& work) const {
  if (flop_per_s <= 0 || bytes_per_s <= 0) return 0;
  return std::max(work.flop / flop_per_s, work.bytes / bytes_per_s) * 1e3;
}

Quartiles quartiles(Samples samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double part) {
    const double place = part * static_cast<double>(samples.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, samples.size() - 1);
    return std::lerp(samples[below], samples[above], place - static_cast<double>(below));
  };
  return {at(0.25), at(0.5), at(0.75)};
}

double median(Samples samples) {
  return quartiles(std::move(samples)).median;
}

Values triple(const Quartiles& q) {
  return Values::array({q.first, q.median, q.third});
}

std::string device_name(Device device) {
  return device == Device::kCuda ? cuda_device_name() : cpu_name();
}

Values versions_of(Device device) {
  Values versions = {{"tilemoe", tilemoe_version()}, {"compiler", TILEMOE_COMPILER}};
  if (device == Device::kCuda) add_cuda_versions(versions);
  return versions;
}

Report::Report(Device device, Limits limits, std::string json_file)
    : device_(device_name(device)),
      versions_(versions_of(device)),
      limits_(limits),
      json_file_(std::move(json_file)) {
  check_writable(json_file_);
}

void Report::add(const std::string& name, Values values) {
  shorten(values);
  const Values line = {{"name", name},
                       {"device", device_},
                       {"versions", versions_},
                       {"commit", TILEMOE_COMMIT},
                       {"values", std::move(values)}};
  lines_ += line.dump() + "\n";
}

void Report::add_times(const std::string& name, const Samples& ms, const std::vector<Work>& steps,
                       const Values& more) {
  const Quartiles q = quartiles(ms);
  Work work;
  double limit = 0;
  for (const Work& one : steps)
    work.flop += one.flop, work.bytes += one.bytes, limit += limits_.ms(one);
  // The slowest quarter has the lowest rate.
  const auto rates = [&](double amount) {
    return Quartiles{amount / q.third, amount / q.median, amount / q.first};
  };
  const Quartiles tflops = rates(work.flop * 1e-9), gb = rates(work.bytes * 1e-6);
  Values values = {{"ms", triple(q)}};
  if (work.flop > 0) values["tflop_per_s"] = triple(tflops);
  if (work.bytes > 0) values["gb_per_s"] = triple(gb);
  if (limit > 0) {
    values["limit_ms"] = limit, values["limit_over_ms"] = triple(rates(limit));
    values["limit_tflop_per_s"] = limits_.flop_per_s * 1e-12;
    values["limit_gb_per_s"] = limits_.bytes_per_s * 1e-9;
  }
  values.update(more);
  rows_.push_back({last_part(name), number(q.median), number(q.first), number(q.third),
                   work.flop > 0 ? number(tflops.median) : "",
                   work.bytes > 0 ? fixed(gb.median, 0) : "", limit > 0 ? number(limit) : "",
                   limit > 0 ? fixed(limit / q.median, 2) : ""});
  add(name, std::move(values));
}

void Report::print(const std::string& title) {
  std::cout << title << "\n";
  if (!rows_.empty()) {
    const bool limited = limits_.flop_per_s > 0;
    Table table({{"", Table::Align::kLeft},
                 {"ms"},
                 {"1st quartile"},
                 {"3rd"},
                 {"TFLOP/s"},
                 {"GB/s"},
                 {limited ? "limit ms" : ""},
                 {limited ? "limit / ms" : ""}});
    for (std::vector<std::string>& row : rows_) table.add(std::move(row));
    table.print(std::cout);
    rows_.clear();
  }
  std::cout << std::endl;
}

void Report::write() const {
  if (json_file_.empty()) return;
  const std::string unfinished = json_file_ + ".part";
  write_file(unfinished, lines_);
  if (std::rename(unfinished.c_str(), json_file_.c_str()) != 0)
    throw std::runtime_error("cannot write " + json_file_);
}

}  // namespace tilemoe::app
