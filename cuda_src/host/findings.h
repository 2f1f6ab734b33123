// The findings of checked mode, over all blocks of a launch.
#pragma once
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "primitives/types.cuh"

namespace cufa_host {

// Many threads make the same mistake: one finding per kind and pair of source lines, with the first message and a count.
class Findings {
 public:
  // Returns whether the finding is new: only then is a message needed.
  bool count(const char* kind, Site site, Site other) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ++entries_[key(kind, site, other)].count == 1;
  }
  void describe(const char* kind, Site site, Site other, std::string message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    entries_[key(kind, site, other)].message = std::move(message);
  }
  // One line each: kind, count, file, line, message, separated by tabs. Empty: nothing found.
  std::string text() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string all;
    for (const auto& [key, entry] : entries_) {
      const auto& [kind, file, line, other_file, other_line] = key;
      all += kind + '\t' + std::to_string(entry.count) + '\t' + file + '\t' + std::to_string(line) + '\t' + entry.message + '\n';
    }
    return all;
  }

 private:
  using Key = std::tuple<std::string, std::string, int, std::string, int>;
  struct Entry {
    u64 count = 0;
    std::string message;
  };
  static Key key(const char* kind, Site site, Site other) { return {kind, site.file, site.line, other.file, other.line}; }
  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

// "forward/fa2/kernel.cu:120"
inline std::string describe(Site site) {
  if (!*site.file) return "plain C++ access";
  const char* inside = std::strstr(site.file, "cuda_src/");  // whatever folder contains it
  return std::string(inside ? inside + 9 : site.file) + ":" + std::to_string(site.line);
}

}  // namespace cufa_host
