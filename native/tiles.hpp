// How a step's rows are gathered into tiles. Touches no tensor; run once per step, for all layers.
#pragma once

#include "kernels.hpp"

namespace quire {

// Items of a step, one after the other: [item] each.
struct Items {
    const int32_t* first_rows;
    const int32_t* num_rows;
    const int32_t* first_positions;
    const int32_t* table_offsets;
    int64_t num_items;
    const int32_t* tables;
};

// Fills `members` (one per row) and `tiles` (at most one per row), dearest first; returns the number of tiles.
int64_t make_tiles(const Items& items, int block_size, int group, Member* members, Tile* tiles);

// Bytes one thread needs for the largest of these tiles.
int64_t scratch_bytes(const AttentionCall& call);

}  // namespace quire
