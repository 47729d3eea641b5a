// Decides which rows process blocks together, and in what order. These decisions save memory bandwidth and do not
// affect the bits of any row. Rows of one work item share a block table. Items of one row (decoding sequences) are
// sorted by table, so that sequences with a common prefix are adjacent; a few adjacent items form a tile, which reads
// the prefix once. Tiles with the same prefix run one after another, while the prefix is in the cache.
#include "attention/query_tiles.hpp"

#include <algorithm>
#include <new>

namespace quire {
namespace {

constexpr int kLinesOfTile = 36;  // query heads (lines) per tile, so that their state and a block fit in the cache
constexpr int kMinTiles = 4;      // minimum number of decode tiles, if there are enough rows, for parallelism

struct Plan {
    QueryTile tile;
    int64_t cost;    // blocks x rows
    int64_t max_cost;  // the largest cost among tiles with the same prefix
};

int num_blocks(const TileRow& member, int block_size) { return member.position / block_size + 1; }

int rows_per_tile(int heads_per_kv) {
    const int max_rows = std::max(1, kLinesOfTile / heads_per_kv);
    for (int rows = max_rows; rows > max_rows / 2; --rows)
        if (rows * heads_per_kv % 12 == 0) return rows;  // fills all register tiles of scores
    return max_rows;
}

void tile_prefill_item(const TileRow* members, int32_t first, int32_t count, int block_size, int max_rows,
              std::vector<Plan>& plans) {
    for (int32_t row = first; row < first + count; row += max_rows) {
        const int32_t num_rows = std::min(max_rows, first + count - row);
        const int shared = num_blocks(members[row + num_rows - 1], block_size);
        const int64_t cost = int64_t{shared} * num_rows;
        plans.push_back({{row, num_rows, shared}, cost, cost});
    }
}

class DecodeTiler {
  public:
    DecodeTiler(const int32_t* tables, int block_size) : tables_(tables), block_size_(block_size) {}

    bool table_less(const TileRow& x, const TileRow& y) const {
        const int32_t *a = tables_ + x.table, *b = tables_ + y.table;
        return std::lexicographical_compare(a, a + num_blocks(x, block_size_), b, b + num_blocks(y, block_size_));
    }

    int num_common(const TileRow& x, const TileRow& y) const {
        const int max_blocks = std::min(num_blocks(x, block_size_), num_blocks(y, block_size_));
        const int32_t *a = tables_ + x.table, *b = tables_ + y.table;
        return static_cast<int>(std::mismatch(a, a + max_blocks, b).first - a);
    }

    // Makes a tile of the rows from `first` on. A row is added as long as the saved block reads do not decrease.
    QueryTile make_tile(const TileRow* members, int32_t first, int32_t end, int max_rows) const {
        QueryTile tile = {first, 1, num_blocks(members[first], block_size_)};
        while (tile.num_members < max_rows && first + tile.num_members < end) {
            const int shared = std::min(tile.num_shared, num_common(members[first], members[first + tile.num_members]));
            if (shared == 0 || int64_t{shared} * tile.num_members < int64_t{tile.num_shared} * (tile.num_members - 1))
                break;
            tile.num_shared = shared;
            ++tile.num_members;
        }
        return tile;
    }

    int64_t cost(const TileRow* members, const QueryTile& tile) const {
        int64_t blocks = 0;
        for (int m = 0; m < tile.num_members; ++m) blocks += num_blocks(members[tile.first_member + m], block_size_);
        return blocks;
    }

  private:
    const int32_t* tables_;
    int block_size_;
};

void tile_decode_rows(TileRow* members, int32_t begin, int32_t end, const WorkItems& items, int block_size,
                 int heads_per_kv, std::vector<Plan>& plans) {
    const DecodeTiler tiler(items.tables, block_size);
    std::sort(members + begin, members + end,
              [&](const TileRow& a, const TileRow& b) { return tiler.table_less(a, b); });
    const int max_rows = std::min(rows_per_tile(heads_per_kv), std::max(2, (end - begin + kMinTiles - 1) / kMinTiles));
    size_t first_with_prefix = plans.size();
    for (int32_t first = begin; first < end;) {
        const QueryTile tile = tiler.make_tile(members, first, end, max_rows);
        const int64_t cost = tiler.cost(members, tile);
        const bool has_new_prefix = first == begin || tiler.num_common(members[first - 1], members[first]) == 0;
        if (has_new_prefix) first_with_prefix = plans.size();
        plans.push_back({tile, cost, 0});
        for (size_t i = first_with_prefix; i < plans.size(); ++i)
            plans[i].max_cost = std::max(plans[first_with_prefix].max_cost, cost);
        first += tile.num_members;
    }
}

}  // namespace

int64_t make_tiles(const WorkItems& items, int block_size, int heads_per_kv, TileRow* members, QueryTile* tiles) {
    std::vector<Plan> plans;
    int32_t count = 0;
    for (int64_t item = 0; item < items.num_items; ++item) {
        if (items.num_rows[item] == 1) continue;
        const int32_t first = count;
        for (int32_t row = 0; row < items.num_rows[item]; ++row)
            members[count++] = {items.first_rows[item] + row, items.first_positions[item] + row,
                                items.table_offsets[item]};
        tile_prefill_item(members, first, count - first, block_size, rows_per_tile(heads_per_kv), plans);
    }
    const int32_t first_decode_row = count;
    for (int64_t item = 0; item < items.num_items; ++item)
        if (items.num_rows[item] == 1)
            members[count++] = {items.first_rows[item], items.first_positions[item], items.table_offsets[item]};
    tile_decode_rows(members, first_decode_row, count, items, block_size, heads_per_kv, plans);
    std::stable_sort(plans.begin(), plans.end(), [](const Plan& a, const Plan& b) { return a.max_cost > b.max_cost; });
    for (size_t i = 0; i < plans.size(); ++i) tiles[i] = plans[i].tile;
    return static_cast<int64_t>(plans.size());
}

namespace {

// A tile is split if one KV head of it costs more than 1 / kSlicesPerShare of a thread's share of the work.
constexpr int kSlicesPerShare = 4;

int num_segments(const AttentionCall& call, const QueryTile& tile) {
    int last = 0;
    for (int m = 0; m < tile.num_members; ++m) last = std::max(last, call.members[tile.first_member + m].position);
    return last / kSegment + 1;
}

int64_t cost_of(const AttentionCall& call, const QueryTile& tile) {
    int64_t blocks = 0;
    for (int m = 0; m < tile.num_members; ++m)
        blocks += num_blocks(call.members[tile.first_member + m], call.block_size);
    return blocks;
}

int64_t num_lines(const AttentionCall& call, const QueryTile& tile) {
    return int64_t{tile.num_members} * (call.num_heads / call.num_kv_heads);
}

// Scratch memory of one thread in bytes, for the largest tile.
int64_t scratch_bytes(const AttentionCall& call) {
    int64_t lines = 0;
    for (int64_t tile = 0; tile < call.num_tiles; ++tile) lines = std::max(lines, num_lines(call, call.tiles[tile]));
    const int64_t record = call.value_size + 2;
    const int64_t numbers = lines * (kMaxHeadSize + 16 + call.value_size + 64 + 16 + 16 + 4 + record) + record + 2 * 16;
    return (4 * numbers + 10 * 64 + 4095) & ~int64_t{4095};  // ten arrays, each padded to a cache line
}

}  // namespace

AttentionScratch::AttentionScratch(AttentionCall& call) {
    int64_t total = 0, num_records = 0;
    int32_t num_split = 0;
    for (int64_t i = 0; i < call.num_tiles; ++i) total += cost_of(call, call.tiles[i]) * call.num_kv_heads;
    for (int32_t i = 0; i < call.num_tiles; ++i) {
        const QueryTile& tile = call.tiles[i];
        const int32_t segments = num_segments(call, tile);
        const bool is_large = call.num_threads > 1 && cost_of(call, tile) * kSlicesPerShare * call.num_threads > total;
        if (segments == 1 || !is_large) {
            slices_.push_back({i, 0, segments, segments, -1, 0});
            continue;
        }
        for (int32_t segment = 0; segment < segments; ++segment)
            slices_.push_back({i, segment, segment + 1, segments, num_split, num_records});
        num_records += segments * num_lines(call, tile) * call.num_kv_heads;
        ++num_split;
    }
    call.slices = slices_.data();
    call.num_slices = static_cast<int64_t>(slices_.size());
    call.scratch_bytes = scratch_bytes(call);
    const int64_t record_bytes = num_records * (call.value_size + 2) * 4;
    const int64_t counter_bytes = num_split * call.num_heads * 4;
    const int64_t num_bytes = call.num_threads * call.scratch_bytes + record_bytes + counter_bytes;
    memory_.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>((num_bytes + 4095) / 4096 * 4096))));
    if (!memory_) throw std::bad_alloc();
    call.scratch = memory_.get();
    call.records = reinterpret_cast<float*>(call.scratch + call.num_threads * call.scratch_bytes);
    call.remaining = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(call.records) + record_bytes);
    for (const TileSlice& slice : slices_)
        for (int head = 0; head < call.num_heads && slice.split >= 0; ++head)
            call.remaining[slice.split * call.num_heads + head] = slice.num_segments;
}

int64_t max_record_bytes(int num_heads, int num_kv_heads, int value_size, int num_threads, int64_t num_tokens) {
    const int64_t lines = std::max(num_heads / num_kv_heads, kLinesOfTile);
    const int64_t segments = (num_tokens + kSegment - 1) / kSegment;
    if (num_threads == 1 || segments == 1) return 0;
    return int64_t{kSlicesPerShare} * num_threads * lines * segments * (value_size + 2) * 4;
}

}  // namespace quire
