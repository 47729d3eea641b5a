// Decides which rows process blocks together, and in what order. These decisions save memory bandwidth and do not
// affect the bits of any row. Rows of one item share its table. Items of one row (decoding sequences) are sorted by
// their tables, so that sequences with a common prefix are adjacent; a few of them form a tile, which reads the prefix
// once. Tiles with the same prefix run one after the other, while the prefix is in the cache.
#include "attention/query_tiles.hpp"

#include <algorithm>
#include <new>

namespace quire {
namespace {

constexpr int kLinesOfTile = 36;  // query heads per tile; their state and a block fit in the cache
constexpr int kMinTiles = 4;      // minimum number of decode tiles, if there are enough rows, for parallelism

struct Planned {
    QueryTile tile;
    int64_t cost;    // blocks x rows
    int64_t family;  // the largest cost among tiles with the same prefix
};

int num_blocks(const TileRow& member, int block_size) { return member.position / block_size + 1; }

int rows_of_tile(int group) {
    const int most = std::max(1, kLinesOfTile / group);
    for (int rows = most; rows > most / 2; --rows)
        if (rows * group % 12 == 0) return rows;  // fills all register tiles of scores
    return most;
}

void tile_prefill_item(const TileRow* members, int32_t first, int32_t count, int block_size, int rows,
              std::vector<Planned>& all) {
    for (int32_t at = first; at < first + count; at += rows) {
        const int32_t taken = std::min(rows, first + count - at);
        const int shared = num_blocks(members[at + taken - 1], block_size);
        const int64_t cost = int64_t{shared} * taken;
        all.push_back({{at, taken, shared}, cost, cost});
    }
}

class DecodeTiler {
  public:
    DecodeTiler(const int32_t* tables, int block_size) : tables_(tables), block_size_(block_size) {}

    bool table_less(const TileRow& one, const TileRow& other) const {
        const int32_t *a = tables_ + one.table, *b = tables_ + other.table;
        return std::lexicographical_compare(a, a + num_blocks(one, block_size_), b, b + num_blocks(other, block_size_));
    }

    int common(const TileRow& one, const TileRow& other) const {
        const int most = std::min(num_blocks(one, block_size_), num_blocks(other, block_size_));
        const int32_t *a = tables_ + one.table, *b = tables_ + other.table;
        return static_cast<int>(std::mismatch(a, a + most, b).first - a);
    }

    // Makes a tile from row `first` on: adds adjacent rows as long as shared blocks x (members - 1), the number of
    // block reads saved, does not decrease.
    QueryTile gather(const TileRow* members, int32_t first, int32_t end, int most) const {
        QueryTile tile = {first, 1, num_blocks(members[first], block_size_)};
        while (tile.num_members < most && first + tile.num_members < end) {
            const int shared = std::min(tile.num_shared, common(members[first], members[first + tile.num_members]));
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

void tile_decode_rows(TileRow* members, int32_t begin, int32_t end, const WorkItems& items, int block_size, int group,
                 std::vector<Planned>& all) {
    const DecodeTiler decoding(items.tables, block_size);
    std::sort(members + begin, members + end,
              [&](const TileRow& a, const TileRow& b) { return decoding.table_less(a, b); });
    const int most = std::min(rows_of_tile(group), std::max(2, (end - begin + kMinTiles - 1) / kMinTiles));
    size_t family = all.size();
    for (int32_t at = begin; at < end;) {
        const QueryTile tile = decoding.gather(members, at, end, most);
        const int64_t cost = decoding.cost(members, tile);
        const bool is_new = at == begin || decoding.common(members[at - 1], members[at]) == 0;
        if (is_new) family = all.size();
        all.push_back({tile, cost, 0});
        for (size_t of = family; of < all.size(); ++of)
            all[of].family = std::max(all[family].family, cost);
        at += tile.num_members;
    }
}

}  // namespace

int64_t make_tiles(const WorkItems& items, int block_size, int group, TileRow* members, QueryTile* tiles) {
    std::vector<Planned> all;
    int32_t count = 0;
    for (int64_t item = 0; item < items.num_items; ++item) {
        if (items.num_rows[item] == 1) continue;
        const int32_t first = count;
        for (int32_t row = 0; row < items.num_rows[item]; ++row)
            members[count++] = {items.first_rows[item] + row, items.first_positions[item] + row,
                                items.table_offsets[item]};
        tile_prefill_item(members, first, count - first, block_size, rows_of_tile(group), all);
    }
    const int32_t lone = count;
    for (int64_t item = 0; item < items.num_items; ++item)
        if (items.num_rows[item] == 1)
            members[count++] = {items.first_rows[item], items.first_positions[item], items.table_offsets[item]};
    tile_decode_rows(members, lone, count, items, block_size, group, all);
    std::stable_sort(all.begin(), all.end(), [](const Planned& a, const Planned& b) { return a.family > b.family; });
    for (size_t at = 0; at < all.size(); ++at) tiles[at] = all[at].tile;
    return static_cast<int64_t>(all.size());
}

namespace {

constexpr int kPieces = 4;  // a tile is split if one of its heads costs more than 1 / kPieces of a thread's share

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
    for (int64_t at = 0; at < call.num_tiles; ++at) lines = std::max(lines, num_lines(call, call.tiles[at]));
    const int64_t record = call.value_size + 2;
    const int64_t numbers = lines * (kMaxHeadSize + 16 + call.value_size + 64 + 16 + 16 + 4 + record) + record + 2 * 16;
    return (4 * numbers + 10 * 64 + 4095) & ~int64_t{4095};  // ten parts, each rounded up to a cache line
}

}  // namespace

AttentionMemory::AttentionMemory(AttentionCall& call) {
    int64_t total = 0, num_records = 0;
    int32_t num_split = 0;
    for (int64_t at = 0; at < call.num_tiles; ++at) total += cost_of(call, call.tiles[at]) * call.num_kv_heads;
    for (int32_t at = 0; at < call.num_tiles; ++at) {
        const QueryTile& tile = call.tiles[at];
        const int32_t segments = num_segments(call, tile);
        const bool is_large = call.num_threads > 1 && cost_of(call, tile) * kPieces * call.num_threads > total;
        if (segments == 1 || !is_large) {
            pieces_.push_back({at, 0, segments, segments, -1, 0});
            continue;
        }
        for (int32_t one = 0; one < segments; ++one)
            pieces_.push_back({at, one, one + 1, segments, num_split, num_records});
        num_records += segments * num_lines(call, tile) * call.num_kv_heads;
        ++num_split;
    }
    call.pieces = pieces_.data();
    call.num_pieces = static_cast<int64_t>(pieces_.size());
    call.scratch_bytes = scratch_bytes(call);
    const int64_t record_bytes = num_records * (call.value_size + 2) * 4;
    const int64_t counter_bytes = num_split * call.num_heads * 4;
    const int64_t num_bytes = call.num_threads * call.scratch_bytes + record_bytes + counter_bytes;
    memory_.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>((num_bytes + 4095) / 4096 * 4096))));
    if (!memory_) throw std::bad_alloc();
    call.scratch = memory_.get();
    call.records = reinterpret_cast<float*>(call.scratch + call.num_threads * call.scratch_bytes);
    call.remaining = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(call.records) + record_bytes);
    for (const TileSlice& piece : pieces_)
        for (int head = 0; head < call.num_heads && piece.split >= 0; ++head)
            call.remaining[piece.split * call.num_heads + head] = piece.num_segments;
}

int64_t most_record_bytes(int num_heads, int num_kv_heads, int value_size, int num_threads, int64_t num_tokens) {
    const int64_t lines = std::max(num_heads / num_kv_heads, kLinesOfTile);
    const int64_t segments = (num_tokens + kSegment - 1) / kSegment;
    if (num_threads == 1 || segments == 1) return 0;
    return int64_t{kPieces} * num_threads * lines * segments * (value_size + 2) * 4;
}

}  // namespace quire
