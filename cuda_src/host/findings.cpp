#include "host/findings.h"

#include <cstring>

namespace cufa_host {

bool Findings::count(const char* kind, Site site, Site other) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ++entries_[key(kind, site, other)].count == 1;
}

void Findings::describe(const char* kind, Site site, Site other, std::string message) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[key(kind, site, other)].message = std::move(message);
}

bool Findings::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return entries_.empty();
}

std::string Findings::text() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string all;
  for (const auto& [key, entry] : entries_) {
    all += std::get<0>(key) + '\t' + std::to_string(entry.count) + '\t' + std::get<1>(key) + '\t' +
           std::to_string(std::get<2>(key)) + '\t' + entry.message + '\n';
  }
  return all;
}

std::string describe(Site site) {
  if (!site.file || !*site.file) return "plain C++ access";
  const char* inside = std::strstr(site.file, "cuda_src/");  // whatever folder that is in
  return std::string(inside ? inside + 9 : site.file) + ":" + std::to_string(site.line);
}

}  // namespace cufa_host
