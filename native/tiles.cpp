// Which rows go through blocks together, and in what order. No row's bits depend on any choice made here: it is about
// memory alone. Rows of one item share its table. Items of one row (decoding sequences) are sorted by their tables, so
// that those with a common prefix are neighbours; a few of them make a tile that reads the prefix once, and tiles with
// the same prefix run one after the other while it is warm.
#include "tiles.hpp"

#include <algorithm>
#include <vector>

namespace quire {
namespace {

constexpr int kLinesOfTile = 32;  // query heads in one tile: their state and a block stay in the first-level cache
constexpr int kMinTiles = 4;      // decoding tiles to leave for threads to share, where there are rows for it

struct Planned {
    Tile tile;
    int64_t cost;    // blocks x rows
    int64_t family;  // the largest cost among tiles with the same prefix
};

int num_blocks(const Member& member, int block_size) { return member.position / block_size + 1; }

int rows_of_tile(int group) {
    const int most = std::max(1, kLinesOfTile / group);
    for (int rows = most; rows > most / 2; --rows)
        if (rows * group % 8 == 0) return rows;  // no registers left empty
    return most;
}

void cut_item(const Member* members, int32_t first, int32_t count, int block_size, int rows,
              std::vector<Planned>& all) {
    for (int32_t at = first; at < first + count; at += rows) {
        const int32_t taken = std::min(rows, first + count - at);
        const int shared = num_blocks(members[at + taken - 1], block_size);
        const int64_t cost = int64_t{shared} * taken;
        all.push_back({{at, taken, shared}, cost, cost});
    }
}

class Decoding {
  public:
    Decoding(const int32_t* tables, int block_size) : tables_(tables), block_size_(block_size) {}

    bool comes_first(const Member& one, const Member& other) const {
        const int32_t *a = tables_ + one.table, *b = tables_ + other.table;
        return std::lexicographical_compare(a, a + num_blocks(one, block_size_), b, b + num_blocks(other, block_size_));
    }

    int common(const Member& one, const Member& other) const {
        const int most = std::min(num_blocks(one, block_size_), num_blocks(other, block_size_));
        const int32_t *a = tables_ + one.table, *b = tables_ + other.table;
        return static_cast<int>(std::mismatch(a, a + most, b).first - a);
    }

    // From `first` on, as many neighbours as keep paying: blocks saved = shared blocks x (members - 1).
    Tile gather(const Member* members, int32_t first, int32_t end, int most) const {
        Tile tile = {first, 1, num_blocks(members[first], block_size_)};
        while (tile.num_members < most && first + tile.num_members < end) {
            const int shared = std::min(tile.num_shared, common(members[first], members[first + tile.num_members]));
            if (shared == 0 || int64_t{shared} * tile.num_members < int64_t{tile.num_shared} * (tile.num_members - 1))
                break;
            tile.num_shared = shared;
            ++tile.num_members;
        }
        return tile;
    }

    int64_t cost(const Member* members, const Tile& tile) const {
        int64_t blocks = 0;
        for (int m = 0; m < tile.num_members; ++m) blocks += num_blocks(members[tile.first_member + m], block_size_);
        return blocks;
    }

  private:
    const int32_t* tables_;
    int block_size_;
};

void gather_lone(Member* members, int32_t begin, int32_t end, const Items& items, int block_size, int group,
                 std::vector<Planned>& all) {
    const Decoding decoding(items.tables, block_size);
    std::sort(members + begin, members + end,
              [&](const Member& a, const Member& b) { return decoding.comes_first(a, b); });
    const int most = std::min(rows_of_tile(group), std::max(2, (end - begin + kMinTiles - 1) / kMinTiles));
    size_t family = all.size();
    for (int32_t at = begin; at < end;) {
        const Tile tile = decoding.gather(members, at, end, most);
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

int64_t make_tiles(const Items& items, int block_size, int group, Member* members, Tile* tiles) {
    std::vector<Planned> all;
    int32_t count = 0;
    for (int64_t item = 0; item < items.num_items; ++item) {
        if (items.num_rows[item] == 1) continue;
        const int32_t first = count;
        for (int32_t row = 0; row < items.num_rows[item]; ++row)
            members[count++] = {items.first_rows[item] + row, items.first_positions[item] + row,
                                items.table_offsets[item]};
        cut_item(members, first, count - first, block_size, rows_of_tile(group), all);
    }
    const int32_t lone = count;
    for (int64_t item = 0; item < items.num_items; ++item)
        if (items.num_rows[item] == 1)
            members[count++] = {items.first_rows[item], items.first_positions[item], items.table_offsets[item]};
    gather_lone(members, lone, count, items, block_size, group, all);
    std::stable_sort(all.begin(), all.end(), [](const Planned& a, const Planned& b) { return a.family > b.family; });
    for (size_t at = 0; at < all.size(); ++at) tiles[at] = all[at].tile;
    return static_cast<int64_t>(all.size());
}

int64_t scratch_bytes(const AttentionCall& call) {
    int64_t members = 0;
    for (int64_t at = 0; at < call.num_tiles; ++at) members = std::max<int64_t>(members, call.tiles[at].num_members);
    const int64_t lines = members * (call.num_heads / call.num_kv_heads);
    const int64_t numbers = lines * (call.key_size + call.value_size + call.block_size + 16 + 3);
    return (4 * numbers + 7 * 64 + 4095) & ~int64_t{4095};  // seven parts, each rounded up to a cache line
}

}  // namespace quire
