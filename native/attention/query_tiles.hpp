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

// Fills `members` (one per row) and `tiles`, those with most work first; returns the number of tiles.
int64_t make_tiles(const WorkItems& items, int block_size, int heads_per_kv, TileRow* members, QueryTile* tiles);

// Slices and scratch memory of an attention call. The constructor sets the fields of the call that point to them; all
// other fields must be set. A tile with more work than a thread's share allows is split into one slice per segment.
class AttentionScratch {
  public:
    explicit AttentionScratch(AttentionCall& call);

  private:
    struct FreeDeleter {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::vector<TileSlice> slices_;
    std::unique_ptr<char, FreeDeleter> memory_;
};

// An upper bound of the bytes of the records (partial results of split tiles) of a call over up to `num_tokens` tokens.
int64_t max_record_bytes(int num_heads, int num_kv_heads, int value_size, int num_threads, int64_t num_tokens);

}  // namespace quire
