// What checked mode has found, gathered over all blocks of a launch.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "host/cuda_language.h"

namespace cufa_host {

// The same mistake is usually made by many threads: one finding per kind and pair of source lines, with the first
// message and a count.
class Findings {
 public:
  // `kind` is a string literal. Returns true when it is new: only then is a message needed.
  bool count(const char* kind, Site site, Site other = {"", 0});
  void describe(const char* kind, Site site, Site other, std::string message);
  bool empty();
  // One line each: kind, count, file, line, message, tab-separated.
  std::string text();

 private:
  using Key = std::tuple<std::string, std::string, int, std::string, int>;
  struct Entry {
    unsigned long long count = 0;
    std::string message;
  };
  static Key key(const char* kind, Site site, Site other) {
    return {kind, site.file, site.line, other.file, other.line};
  }
  std::mutex mutex_;
  std::map<Key, Entry> entries_;
};

std::string describe(Site site);

}  // namespace cufa_host
