// Groups the rows of a step into tiles. Accesses no tensors; runs once per step, for all layers.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "builds/kernels.hpp"

namespace quire {

// The work items of a step, as arrays [item]: each item is consecutive rows of one sequence.
struct WorkItems {
    const int32_t* first_rows;
    const int32_t* num_rows;
    const int32_t* first_positions;
    const int32_t* table_offsets;
    int64_t num_items;
    const int32_t* tables;
};

// Fills `members` (one per row) and `tiles` (at most one per row), most expensive first; returns the number of tiles.
int64_t make_tiles(const WorkItems& items, int block_size, int group, TileRow* members, QueryTile* tiles);

// Slices and scratch memory of an attention call. Sets these fields of the call (all others are already set) and owns
// the memory. A tile with several segments that is large for a thread's share is split into one slice per segment.
class AttentionMemory {
  public:
    explicit AttentionMemory(AttentionCall& call);

  private:
    struct FreeDeleter {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::vector<TileSlice> pieces_;
    std::unique_ptr<char, FreeDeleter> memory_;
};

// An upper bound of the record bytes of any such call; it exists because the number of tiles above a share is limited.
int64_t most_record_bytes(int num_heads, int num_kv_heads, int value_size, int num_threads, int64_t num_tokens);

}  // namespace quire
