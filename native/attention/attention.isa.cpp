// Attention of a step's rows over the blocks of the KV store: prefill and decode rows in one call. Reads queries, keys,
// values and the slices made by query_tiles.cpp; writes only `out`, the scratch memory and the records.
//
// For each row and head, blocks are processed in table order, segment by segment. Segment boundaries are positions and
// depend only on the row. Each segment has a separate running maximum (online softmax), and the results of segments are
// merged in order:
//
//     positions    0 ...      1024 ...      2048 ...
//     results      segment 0  segment 1     segment 2
//                      \_________/              |
//                         merged                |
//                             \_________________/
//                                    merged  ->  out
//
// So the result does not depend on which thread computes a segment, or when. Most tiles are one slice of work. A tile
// with more work than a thread's share allows has one slice per segment; the thread that finishes last merges them.
#include "attention/attention_block.isa.hpp"
#include "team/team.hpp"

namespace quire::QUIRE_ISA {
namespace {

// The entries [from, to) of a block table.
struct BlockRange {
    int from, to;
};

QUIRE_INLINE BlockRange segment_span(const AttentionCall& call, int segment) {
    const int size = kSegment / call.block_size;
    return {segment * size, (segment + 1) * size};
}

QUIRE_INLINE BlockRange intersection(BlockRange a, BlockRange b) {
    return {a.from > b.from ? a.from : b.from, a.to < b.to ? a.to : b.to};
}

QUIRE_INLINE int window_start(const AttentionCall& call, const TileRow& member) {
    const int first = call.window < 0 ? 0 : member.position - call.window + 1;
    return first > 0 ? first : 0;
}

QUIRE_INLINE int first_segment(const AttentionCall& call, const TileRow& member) {
    return window_start(call, member) / kSegment;
}

QUIRE_INLINE bool attends(const AttentionCall& call, const TileRow& member, int segment) {
    return first_segment(call, member) <= segment && segment <= member.position / kSegment;
}

QUIRE_INLINE int heads_per_kv_head(const AttentionCall& call) { return call.num_heads / call.num_kv_heads; }

// The members of a tile, one KV head and one segment of positions.
struct TileSegment {
    const QueryTile& tile;
    const TileRow* members;
    int head;
    BlockRange span;

    TileSegment(const AttentionCall& call, const QueryTile& tile, int head, int segment)
        : tile(tile), members(call.members + tile.first_member), head(head), span(segment_span(call, segment)) {}
};

// The entries that all members of a tile process together, as a range of the first member's table.
QUIRE_INLINE BlockRange shared_span(const AttentionCall& call, const TileSegment& part) {
    int first_visible = window_start(call, part.members[0]);
    for (int m = 1; m < part.tile.num_members; ++m) {
        const int first = window_start(call, part.members[m]);
        first_visible = first < first_visible ? first : first_visible;
    }
    return intersection(part.span, {first_visible / call.block_size, part.tile.num_shared});
}

// The entries that only member `m` processes.
QUIRE_INLINE BlockRange own_span(const AttentionCall& call, const TileSegment& part, int m) {
    const TileRow& member = part.members[m];
    const int first = window_start(call, member) / call.block_size;
    return intersection(part.span, {first > part.tile.num_shared ? first : part.tile.num_shared,
                              member.position / call.block_size + 1});
}

// The first block that one of the members [m, ...) processes alone; null if there is none.
template <typename T>
QUIRE_INLINE Block<T> next_own_block(const AttentionCall& call, const TileSegment& part, int m) {
    for (; m < part.tile.num_members; ++m) {
        const BlockRange span = own_span(call, part, m);
        if (span.from < span.to) return block_of<T>(call, part.head, call.tables[part.members[m].table + span.from]);
    }
    return Block<T>{};
}

template <typename T>
QUIRE_INLINE Block<T> first_block(const AttentionCall& call, const TileSegment& part) {
    const BlockRange shared = shared_span(call, part);
    if (shared.from >= shared.to) return next_own_block<T>(call, part, 0);
    return block_of<T>(call, part.head, call.tables[part.members[0].table + shared.from]);
}

// The queue of work units (one slice and one KV head each) of a thread. A thread takes its next unit when it begins the
// last block of the current unit, to prefetch the memory of the next unit.
class SliceQueue {
  public:
    SliceQueue(const AttentionCall& call, Tasks tasks) : call_(call), tasks_(tasks) {}

    // Takes the next unit to compute; returns false if none is left.
    bool take(int64_t& unit) {
        fetch();
        is_fetched_ = false;
        unit = next_;
        return has_next_;
    }

    // The first block of the unit after the current one; null if there is none.
    template <typename T>
    Block<T> upcoming() {
        fetch();
        if (!has_next_) return Block<T>{};
        const TileSlice& slice = call_.slices[next_ / call_.num_kv_heads];
        const int head = int(next_ % call_.num_kv_heads);
        return first_block<T>(call_, TileSegment(call_, call_.tiles[slice.tile], head, slice.first_segment));
    }

  private:
    void fetch() {
        if (!is_fetched_) has_next_ = tasks_.take(next_);
        is_fetched_ = true;
    }

    const AttentionCall& call_;
    Tasks tasks_;
    int64_t next_ = 0;
    bool is_fetched_ = false, has_next_ = false;
};

// Processes the entries `span` of one table for members [first, first + count). `after` is the block of this slice to
// prefetch after these; null: prefetch the first block of the next unit.
template <typename T>
void attend_blocks(const AttentionCall& call, const TileScratch& work, const TileSegment& part, int first, int count, BlockRange span, SliceQueue& units,
          Block<T> after) {
    const int group = heads_per_kv_head(call);
    const int32_t* table = call.tables + part.members[first].table;
    for (int index = span.from; index < span.to; ++index) {
        const Block<T> block = block_of<T>(call, part.head, table[index]);
        const Block<T> next = index + 1 < span.to     ? block_of<T>(call, part.head, table[index + 1])
                              : after.keys != nullptr ? after : units.upcoming<T>();
        const int offset = index * call.block_size;
        int run = first;  // start of a run of consecutive members that attend to slots of this block
        for (int m = first; m < first + count; ++m) {
            const TileRow& member = part.members[m];
            const int first_slot = window_start(call, member) - offset, end_slot = member.position + 1 - offset;
            const int begin = first_slot > 0 ? first_slot : 0;
            const int end = end_slot < call.block_size ? end_slot : call.block_size;
            for (int64_t line = int64_t{m} * group; line < int64_t{m + 1} * group; ++line) {
                work.begin[line] = begin;
                work.end[line] = end;
            }
            if (begin < end) continue;
            if (run < m) attend_block<T>(call, work, int64_t{run} * group, int64_t{m - run} * group, block, next);
            run = m + 1;
        }
        const int num_left = first + count - run;
        if (num_left > 0) attend_block<T>(call, work, int64_t{run} * group, int64_t{num_left} * group, block, next);
    }
}

QUIRE_INLINE void scale_queries(const AttentionCall& call, const TileScratch& work, const QueryTile& tile, int head) {
    const int group = heads_per_kv_head(call);
    for (int64_t line = 0; line < int64_t{tile.num_members} * group; ++line) {
        const TileRow& member = call.members[tile.first_member + line / group];
        const int64_t head_offset = (head * group + line % group) * call.key_size;
        const float* query = call.queries + member.row * call.query_stride + head_offset;
        float* scaled = work.queries + line * kQueryStride;
        for (int i = 0; i < call.key_size; ++i) scaled[i] = query[i] * call.scale;
    }
}

// Processes one segment of a tile. `after` is the block to prefetch after it; null: the first block of the next unit.
template <typename T>
void attend_segment(const AttentionCall& call, const TileScratch& work, const TileSegment& part, SliceQueue& units, Block<T> after) {
    const int num_members = part.tile.num_members;
    for (int64_t line = 0; line < int64_t{num_members} * heads_per_kv_head(call); ++line) {
        float* sums = work.sums + line * call.value_size;
        for (int i = 0; i < call.value_size; ++i) sums[i] = 0.0f;
        store(work.totals + line * kLanes, F{});
        work.peaks[line] = -kInfinity;
    }
    const Block<T> own_block = next_own_block<T>(call, part, 0);
    attend_blocks<T>(call, work, part, 0, num_members, shared_span(call, part), units, own_block.keys != nullptr ? own_block : after);
    for (int m = 0; m < num_members; ++m) {
        const BlockRange span = own_span(call, part, m);
        if (span.from >= span.to) continue;
        const Block<T> next = next_own_block<T>(call, part, m + 1);
        attend_blocks<T>(call, work, part, m, 1, span, units, next.keys != nullptr ? next : after);
    }
}

// A record is the partial result of a line: sums of weighted values, the total weight, and the peak (maximum score).
QUIRE_INLINE int64_t record_size(const AttentionCall& call) { return call.value_size + 2; }

QUIRE_INLINE void save_record(const AttentionCall& call, const TileScratch& work, int64_t line, float* record) {
    const float* sums = work.sums + line * call.value_size;
    for (int i = 0; i < call.value_size; ++i) record[i] = sums[i];
    record[call.value_size] = sum_lanes<kLanes>(load<kLanes>(work.totals + line * kLanes));
    record[call.value_size + 1] = work.peaks[line];
}

// Merges the record of a segment into that of earlier segments. For a peak of -infinity see `finite_max`.
QUIRE_INLINE void merge_partials(const AttentionCall& call, float* merged, const float* record) {
    const int peak_index = call.value_size + 1;
    const float old_peak = merged[peak_index], top = record[peak_index], peak = top > old_peak ? top : old_peak;
    const float base = peak == -kInfinity ? 0.0f : peak;
    const float old_factor = weight_of(splat<kLanes>(old_peak - base))[0];
    const float new_factor = weight_of(splat<kLanes>(top - base))[0];
    for (int i = 0; i < peak_index; ++i) merged[i] = merged[i] * old_factor + record[i] * new_factor;
    merged[peak_index] = peak;
}

// The final factor of the sums, 1 / total weight. An attention sink adds to the total weight but has no value.
QUIRE_INLINE float normalizer(const AttentionCall& call, int head, float total, float peak) {
    if (call.sinks == nullptr) return 1.0f / total;
    const float sink = call.sinks[head], top = sink > peak ? sink : peak;
    const float factor = weight_of(splat<kLanes>(peak - top))[0], sink_weight = weight_of(splat<kLanes>(sink - top))[0];
    return factor / (total * factor + sink_weight);
}

template <typename T>
QUIRE_INLINE void write_output(const AttentionCall& call, const TileRow& member, int head, float* merged) {
    float* out = call.out + member.row * call.out_stride + head * call.value_size;
    if constexpr (is_deinterleaved<T>)
        for (int i = 0; i + kSumVectors * kLanes <= call.value_size; i += kSumVectors * kLanes)
            for (int n = 0; n < kSumVectors; n += 2) {
                F even = load<kLanes>(merged + i + n * kLanes), odd = load<kLanes>(merged + i + (n + 1) * kLanes);
                interleave<kLanes>(even, odd);
                store(merged + i + n * kLanes, even);
                store(merged + i + (n + 1) * kLanes, odd);
            }
    const float factor = normalizer(call, head, merged[call.value_size], merged[call.value_size + 1]);
    for (int i = 0; i < call.value_size; ++i) out[i] = merged[i] * factor;
}

template <typename Function>
QUIRE_INLINE void for_lines(const AttentionCall& call, const QueryTile& tile, int head, Function function) {
    const int group = heads_per_kv_head(call);
    for (int64_t line = 0; line < int64_t{tile.num_members} * group; ++line)
        function(line, call.members[tile.first_member + line / group], int(head * group + line % group));
}

// Processes all segments of a tile in order, and merges the result of each segment before the next segment.
template <typename T>
void attend_whole(const AttentionCall& call, const TileScratch& work, const TileSlice& slice, int head, SliceQueue& units) {
    const QueryTile& tile = call.tiles[slice.tile];
    for (int segment = slice.first_segment; segment < slice.end_segment; ++segment) {
        bool is_visible = false;
        for (int m = 0; m < tile.num_members; ++m) is_visible |= attends(call, call.members[tile.first_member + m],
                                                                            segment);
        if (!is_visible) continue;
        const TileSegment part(call, tile, head, segment);
        const bool is_last = segment + 1 == slice.end_segment;
        const Block<T> after = is_last ? Block<T>{} : first_block<T>(call, TileSegment(call, tile, head, segment + 1));
        attend_segment<T>(call, work, part, units, after);
        for_lines(call, tile, head, [&](int64_t line, const TileRow& member, int) {
            float* merged = work.merged_records + line * record_size(call);
            if (segment == first_segment(call, member)) return save_record(call, work, line, merged);
            if (!attends(call, member, segment)) return;
            save_record(call, work, line, work.segment_record);
            merge_partials(call, merged, work.segment_record);
        });
    }
    for_lines(call, tile, head, [&](int64_t line, const TileRow& member, int query_head) {
        write_output<T>(call, member, query_head, work.merged_records + line * record_size(call));
    });
}

// Processes one segment of a split tile. Records are stored as [head, segment, line]. The thread that finishes the
// last segment of a head merges the records of that head.
template <typename T>
void attend_segment_alone(const AttentionCall& call, const TileScratch& work, const TileSlice& slice, int head, SliceQueue& units) {
    const QueryTile& tile = call.tiles[slice.tile];
    const int64_t lines = int64_t{tile.num_members} * heads_per_kv_head(call);
    float* const records = call.records + (slice.first_record + head * slice.num_segments * lines) * record_size(call);
    const auto record = [&](int of, int64_t line) { return records + (of * lines + line) * record_size(call); };
    const int segment = slice.first_segment;
    attend_segment<T>(call, work, TileSegment(call, tile, head, segment), units, Block<T>{});
    for_lines(call, tile, head, [&](int64_t line, const TileRow& member, int) {
        if (attends(call, member, segment)) save_record(call, work, line, record(segment, line));
    });
    int32_t& remaining = call.remaining[slice.split * call.num_heads + head];
    if (__atomic_sub_fetch(&remaining, 1, __ATOMIC_ACQ_REL) > 0) return;
    remaining = slice.num_segments;
    for_lines(call, tile, head, [&](int64_t line, const TileRow& member, int of) {
        const int first = first_segment(call, member);
        for (int next = first + 1; next <= member.position / kSegment; ++next)
            merge_partials(call, record(first, line), record(next, line));
        write_output<T>(call, member, of, record(first, line));
    });
}

template <typename T>
void attend_slice(const AttentionCall& call, const TileSlice& slice, int head, char* scratch, SliceQueue& units) {
    const TileScratch work = split_scratch(call, call.tiles[slice.tile], scratch);
    scale_queries(call, work, call.tiles[slice.tile], head);
    if (slice.end_segment - slice.first_segment == slice.num_segments)
        attend_whole<T>(call, work, slice, head, units);
    else
        attend_segment_alone<T>(call, work, slice, head, units);
}

}  // namespace

void attention(const AttentionCall& call, TeamThread& thread) {
    const int64_t num_units = call.num_slices * call.num_kv_heads;
    char* scratch = call.scratch + thread.number() * call.scratch_bytes;
    Tasks padded_rows = thread.tasks(call.num_padded_rows - call.num_rows);
    for (int64_t row; padded_rows.take(row);)
        for (int i = 0; i < call.num_heads * call.value_size; ++i)
            call.out[(call.num_rows + row) * call.out_stride + i] = 0.0f;
    SliceQueue units(call, thread.tasks_in_order(num_units));
    for (int64_t unit; units.take(unit);) {
        const TileSlice& slice = call.slices[unit / call.num_kv_heads];
        const int head = int(unit % call.num_kv_heads);
        if (call.kv_type == KVType::float32)
            attend_slice<float>(call, slice, head, scratch, units);
        else if (call.kv_type == KVType::bfloat16)
            attend_slice<bf16>(call, slice, head, scratch, units);
        else
            attend_slice<int8_t>(call, slice, head, scratch, units);
    }
}

}  // namespace quire::QUIRE_ISA
