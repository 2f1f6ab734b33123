// Shared-memory wavefronts and global-memory sectors of one warp's accesses (counted mode).
//
// The model: shared memory has 32 banks of 4 bytes. A warp-wide access of 4 bytes per lane is one pass; of 8 bytes two
// (half a warp each), of 16 bytes four. A pass takes as many wavefronts as its busiest bank has distinct words.
#pragma once
#include <cstdint>
#include <vector>

#include "host/counters.h"
#include "host/cuda_language.h"
#include "host/launch.h"

namespace cufa_host {

// Wavefronts of one pass.
int wavefronts(const std::uint32_t* addresses, int count, std::uint32_t bytes);

// Keeps a pass for a picture of its banks, if `cufa_keep_passes` asked for them. `part`: index of the pass in its instruction.
// `lanes`: the lane of each address; null: address i belongs to lane 8 · part + i.
void keep_pass(CufaPass::Kind kind, Site site, int part, const std::uint32_t* addresses, const std::uint8_t* lanes, int count,
               std::uint32_t bytes, int waves);

// Loads and stores are executed lane by lane. The log joins them to warp-wide accesses: by source line, and by the number of
// times that each lane has passed there.
class AccessLog {
 public:
  enum Kind : std::uint8_t { shared_read, shared_write, global_read, global_write };
  void add(Kind kind, Site site, int lane, std::uint64_t address, std::uint32_t bytes);
  // All lanes have reached a common point: count the logged accesses and forget them.
  void flush(Counters& counters);

 private:
  struct Entry {
    Site site;
    std::uint32_t occurrence;
    Kind kind;
    std::uint8_t lane;
    std::uint32_t bytes;
    std::uint64_t address;
  };
  static void count_group(const Entry* first, const Entry* last, Counters& counters);
  std::vector<Entry> entries_;
};

}  // namespace cufa_host
