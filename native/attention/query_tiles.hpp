// How a step's rows are gathered into tiles. Touches no tensor; run once per step, for all layers.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "builds/kernels.hpp"

namespace quire {

// WorkItems of a step, one after the other: [item] each.
struct WorkItems {
    const int32_t* first_rows;
    const int32_t* num_rows;
    const int32_t* first_positions;
    const int32_t* table_offsets;
    int64_t num_items;
    const int32_t* tables;
};

// Fills `members` (one per row) and `tiles` (at most one per row), dearest first; returns the number of tiles.
int64_t make_tiles(const WorkItems& items, int block_size, int group, TileRow* members, QueryTile* tiles);

// What attention needs beside its tiles: the pieces they are taken in, and memory to work in. Fills these fields of the
// call, whose other fields are set, and holds what they point to. A tile that is large for a thread's share of the call
// and has several segments is taken segment by segment.
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

// The most bytes that records of such calls take, whatever the step: only so many tiles are larger than a share.
int64_t most_record_bytes(int num_heads, int num_kv_heads, int value_size, int num_threads, int64_t num_tokens);

}  // namespace quire
