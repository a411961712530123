#include "doctor_report.h"

#include <algorithm>
#include <sstream>

#include "table.h"

namespace tilemoe::app {
namespace {

constexpr size_t kFailuresShown = 5;

bool failed(const DoctorTimes& times) {
  return !times.failed.empty();
}

bool failed(const DoctorKit& kit) {
  return !kit.failures.empty() || std::any_of(kit.times.begin(), kit.times.end(),
                                              [](const auto& one) { return failed(one); });
}

std::string whole(size_t count) {
  return bytes(static_cast<double>(count));
}

void print_checks(const DoctorKit& kit, std::ostream& out) {
  if (!kit.skipped.empty()) {
    out << kit.kit << ": not run: " << kit.skipped << "\n";
    return;
  }
  out << kit.kit << ": " << kit.cases << " cases, " << kit.tensors << " tensors, "
      << kit.failures.size() << " failures, " << fixed(kit.seconds, 0) << " s\n";
  const size_t shown = std::min(kit.failures.size(), kFailuresShown);
  for (size_t i = 0; i < shown; ++i) out << "  " << kit.failures[i] << "\n";
  if (shown < kit.failures.size()) out << "  and " << kit.failures.size() - shown << " more\n";
}

void print_times(const std::vector<DoctorKit>& kits, std::ostream& out) {
  Table table({{"layer", Table::Align::kLeft},
               {"kit", Table::Align::kLeft},
               {"T"},
               {"d"},
               {"n"},
               {"E"},
               {"K"},
               {"forward ms"},
               {"backward ms"},
               {"dense ms"},
               {"dense/layer"}});
  std::string notes;
  bool any = false;
  for (const DoctorKit& kit : kits)
    for (const DoctorTimes& one : kit.times) {
      const std::string& why = failed(one) ? one.failed : one.skipped;
      if (!why.empty()) {
        notes += one.layer + ", " + kit.kit + ": " + (failed(one) ? "FAILED: " : "not timed: ") +
                 why + "\n";
        continue;
      }
      any = true;
      const double layer = one.forward + one.backward;
      table.add({one.layer, kit.kit, std::to_string(one.T) + (one.fewer_tokens ? " (fewer)" : ""),
                 std::to_string(one.d), std::to_string(one.n), std::to_string(one.E),
                 std::to_string(one.K), fixed(one.forward, 3), fixed(one.backward, 3),
                 one.dense > 0 ? fixed(one.dense, 3) : "",
                 one.dense > 0 ? fixed(one.dense / layer, 2) : ""});
    }
  if (any) table.print(out);
  out << notes;
}

nlohmann::json json_of(const DoctorTimes& one) {
  nlohmann::json entry = {
      {"layer", one.layer},
      {"shape", {{"T", one.T}, {"d", one.d}, {"n", one.n}, {"E", one.E}, {"K", one.K}}},
      {"fewer_tokens", one.fewer_tokens}};
  if (failed(one))
    entry["failed"] = one.failed;
  else if (!one.skipped.empty())
    entry["skipped"] = one.skipped;
  else
    entry.update({{"fwd_ms", one.forward}, {"bwd_ms", one.backward}, {"dense_ms", one.dense}});
  return entry;
}

}  // namespace

bool DoctorReport::passed() const {
  const bool ran = std::any_of(kits.begin(), kits.end(), [](const DoctorKit& one) {
    return one.skipped.empty() && one.cases > 0;
  });
  return ran && std::none_of(kits.begin(), kits.end(), [](const auto& one) { return failed(one); });
}

std::string DoctorReport::verdict() const {
  std::string good, bad;
  for (const DoctorKit& one : kits) {
    if (!one.skipped.empty()) continue;
    std::string& names = failed(one) ? bad : good;
    names += (names.empty() ? "" : ", ") + one.kit;
  }
  if (good.empty() && bad.empty()) return "FAILED: no kit runs here";
  if (!bad.empty()) return "FAILED: " + bad + (good.empty() ? "" : "; passed: " + good);
  return passed() ? "passed: " + good : "FAILED: nothing was compared";
}

std::string DoctorReport::text() const {
  std::ostringstream out;
  out << "TileMoE   " << version << ", commit " << commit << ", " << build << "\n"
      << "GPU       " << gpu.name << ", compute capability " << gpu.capability << ", "
      << gpu.multiprocessors << " multiprocessors, " << whole(gpu.shared_bytes)
      << " of shared memory a block\n"
      << "memory    " << whole(gpu.total_bytes) << ", " << whole(gpu.free_bytes) << " free\n"
      << "driver    " << (gpu.driver.empty() ? "" : gpu.driver + ", ") << "CUDA " << gpu.driver_cuda
      << "; the library's runtime " << gpu.runtime << "\n"
      << "kit       " << kit << "\n\nAgainst float64, the reduced registry:\n";
  for (const DoctorKit& one : kits) print_checks(one, out);
  out << "\nForward and backward in bfloat16, and its products alone, dense:\n";
  print_times(kits, out);
  out << "\nverdict   " << verdict() << "\n";
  return out.str();
}

nlohmann::json DoctorReport::json() const {
  nlohmann::json all = {{"version", version},
                        {"commit", commit},
                        {"build", build},
                        {"gpu",
                         {{"name", gpu.name},
                          {"capability", gpu.capability},
                          {"multiprocessors", gpu.multiprocessors},
                          {"shared_bytes", gpu.shared_bytes},
                          {"total_bytes", gpu.total_bytes},
                          {"free_bytes", gpu.free_bytes},
                          {"driver", gpu.driver},
                          {"driver_cuda", gpu.driver_cuda},
                          {"runtime", gpu.runtime}}},
                        {"kit", kit},
                        {"kits", nlohmann::json::array()},
                        {"passed", passed()},
                        {"verdict", verdict()}};
  for (const DoctorKit& one : kits) {
    nlohmann::json entry = {{"kit", one.kit}};
    if (!one.skipped.empty()) {
      entry["skipped"] = one.skipped;
    } else {
      entry.update({{"cases", one.cases},
                    {"tensors", one.tensors},
                    {"seconds", one.seconds},
                    {"failures", one.failures},
                    {"times", nlohmann::json::array()}});
      for (const DoctorTimes& times : one.times) entry["times"].push_back(json_of(times));
    }
    all["kits"].push_back(std::move(entry));
  }
  return all;
}

}  // namespace tilemoe::app
