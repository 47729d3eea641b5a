// Attention of a step's rows over the blocks of the KV store: prefill and decode rows in one call. Reads queries, keys,
// values and the tiles made by tiles.cpp; writes `out` and its scratch, nothing else.
//
// One row and head goes through its blocks in table order with a running maximum (online softmax). The score of a slot
// is summed over the head's dimensions in order, vectors lie across slots; the sum over values runs slot by slot,
// vectors lie across the head. Tiles only decide how many such rows are in registers at once, never the order inside a
// row. Slots a row may not see may hold anything, NaN too: their scores are replaced, and their values are never read.
#include <omp.h>

#include "simd.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;
typedef Lanes<kLanes>::I I;

// How much is held in registers: rows x vectors of scores, rows x vectors of sums.
constexpr int kScoreVectors = 2, kScoreRows = kRegisters / 4, kSumVectors = 4, kSumRows = kRegisters / 8;
constexpr float kInfinity = __builtin_inff();

// A tile's work in progress. "Line" = one query head of one member; lines of a member are neighbours.
struct Work {
    float* queries;  // [line, key size], scaled
    float* sums;     // [line, value size]
    float* weights;  // [line, block size]: scores, then weights of the block at hand
    float* totals;   // [line, kLanes]
    float* peaks;    // [line]
    int32_t* begin;  // [line]: the slots of the block at hand that a line sees; by line, because dividing is slow
    int32_t* end;
};

QUIRE_INLINE int64_t rounded(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

Work cut(const AttentionCall& call, const Tile& tile, char* scratch) {
    const int64_t lines = int64_t{tile.num_members} * (call.num_heads / call.num_kv_heads);
    auto take = [&scratch](int64_t count) {
        char* part = scratch;
        scratch += rounded(4 * count);
        return part;
    };
    Work work;
    work.queries = reinterpret_cast<float*>(take(lines * call.key_size));
    work.sums = reinterpret_cast<float*>(take(lines * call.value_size));
    work.weights = reinterpret_cast<float*>(take(lines * call.block_size));
    work.totals = reinterpret_cast<float*>(take(lines * kLanes));
    work.peaks = reinterpret_cast<float*>(take(lines));
    work.begin = reinterpret_cast<int32_t*>(take(lines));
    work.end = reinterpret_cast<int32_t*>(take(lines));
    return work;
}

// Ask for memory of the next block while this one is computed, a little with every step: all of it at once would stall.
// Into the second-level cache: the first has too few requests on their way to keep the memory busy.
template <int Bytes>
QUIRE_INLINE void ask_for(const void* ahead) {
#pragma GCC unroll 8
    for (int at = 0; at < Bytes; at += 64) __builtin_prefetch(static_cast<const char*>(ahead) + at, 0, 2);
}

// Weighing reads nothing from memory, which would rest for so long: each of a few lines asks for so many slots of the
// next values, and summing asks for the others.
constexpr int kAskedByLine = 2;

template <typename T>
QUIRE_INLINE const T* moved(const T* ahead, int by) {
    return ahead == nullptr ? nullptr : ahead + by;
}

// N vectors of L numbers, two and two as `load_two` gives them, held in registers.
template <int N, int L, typename T>
QUIRE_INLINE void load_vectors(const T* from, typename Lanes<L>::F* to) {
#pragma GCC unroll 8
    for (int n = 0; n + 1 < N; n += 2) {
        load_two<L>(from + n * L, to[n], to[n + 1]);
        to[n] = held(to[n]);
        to[n + 1] = held(to[n + 1]);
    }
    if constexpr (N % 2) to[N - 1] = held(load<L>(from + (N - 1) * L));
}

// Scores of R lines with N vectors of slots. `ahead` is the same place in the next block, or null.
template <int R, int N, typename T>
QUIRE_INLINE void score_panel(const float* queries, int key_size, const T* keys, int block_size, float* scores,
                              const T* ahead) {
    F sums[R][N] = {};
    for (int i = 0; i < key_size; ++i) {
        F key[N];
        if (ahead != nullptr) ask_for<N * kLanes * sizeof(T)>(ahead + int64_t{i} * block_size);
        load_vectors<N, kLanes>(keys + int64_t{i} * block_size, key);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F query = splat<kLanes>(queries[int64_t{r} * key_size + i]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = fused(query, key[n], sums[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        if constexpr (paired<T>)
            for (int n = 0; n + 1 < N; n += 2) in_order<kLanes>(sums[r][n], sums[r][n + 1]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(scores + int64_t{r} * block_size + n * kLanes, sums[r][n]);
    }
}

template <int R, typename T>
void score_lines(const float* queries, int key_size, const T* keys, int block_size, float* scores, const T* ahead) {
    constexpr int wide = kScoreVectors * kLanes;
    int slot = 0;
    for (; slot + wide <= block_size; slot += wide)
        score_panel<R, kScoreVectors>(queries, key_size, keys + slot, block_size, scores + slot, moved(ahead, slot));
    if (slot < block_size)
        score_panel<R, 1>(queries, key_size, keys + slot, block_size, scores + slot, moved(ahead, slot));
}

template <typename T, int R = kScoreRows>
void score(int count, const float* queries, int key_size, const T* keys, int block_size, float* scores,
           const T* ahead) {
    if constexpr (R > 0) {
        if (count == R) return score_lines<R>(queries, key_size, keys, block_size, scores, ahead);
        score<T, R - 1>(count, queries, key_size, keys, block_size, scores, ahead);
    }
}

// tanh by the one exp. Its error is absolute, a few 1e-8: all that a score needs.
QUIRE_INLINE F tanh_of(F x) {
    const F size = x < 0.0f ? -x : x;
    const F e = exp_of<kLanes>(size * -2.0f);
    const F y = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -y : y;
}

QUIRE_INLINE void scale_by(float* numbers, int size, float factor) {
    for (int i = 0; i < size; ++i) numbers[i] *= factor;
}

// The largest score of a line among those it sees; the others become -infinity.
QUIRE_INLINE float top_score(const AttentionCall& call, float* scores, int begin, int end) {
    F top = splat<kLanes>(-kInfinity);
    if (begin == 0 && end == call.block_size && call.softcap <= 0.0f) {  // most blocks: nothing to leave out or bend
        for (int slot = 0; slot < call.block_size; slot += kLanes) {
            const F s = load<kLanes>(scores + slot);
            top = s > top ? s : top;
        }
        return max_lanes<kLanes>(top);
    }
    I lane;
    for (int l = 0; l < kLanes; ++l) lane[l] = l;
    for (int slot = 0; slot < call.block_size; slot += kLanes) {
        F s = load<kLanes>(scores + slot);
        if (call.softcap > 0.0f) s = tanh_of(s / call.softcap) * call.softcap;
        const I at = lane + slot;
        s = ((at >= begin) & (at < end)) ? s : splat<kLanes>(-kInfinity);
        store(scores + slot, s);
        top = s > top ? s : top;
    }
    return max_lanes<kLanes>(top);
}

// Scores to weights under this peak, and what the weights sum to beside what was there.
QUIRE_INLINE void weigh_under(const AttentionCall& call, float* scores, float under, F total, float* totals) {
    for (int slot = 0; slot < call.block_size; slot += kLanes) {
        const F weight = exp_of<kLanes>(load<kLanes>(scores + slot) - under);
        store(scores + slot, weight);
        total = total + weight;
    }
    store(totals, total);
}

// Turn a line's scores into weights under its new peak, and bring what was summed before under it too. The peak seldom
// moves, and nothing waits for the factor if it does not: the way for few lines.
QUIRE_INLINE void weigh_one(const AttentionCall& call, const Work& work, int64_t line) {
    float *scores = work.weights + line * call.block_size, *totals = work.totals + line * kLanes;
    const float top = top_score(call, scores, work.begin[line], work.end[line]), old = work.peaks[line];
    const float peak = top > old ? top : old;
    // A row whose every score is NaN or -infinity has no peak; zero instead keeps NaN visible and divides by nothing.
    const float under = peak == -kInfinity ? 0.0f : peak;
    F total = load<kLanes>(totals);
    if (peak != old) {
        const float factor = exp_of<kLanes>(splat<kLanes>(old - under))[0];
        scale_by(work.sums + line * call.value_size, call.value_size, factor);
        total = total * factor;
        work.peaks[line] = peak;
    }
    weigh_under(call, scores, under, total, totals);
}

// The same for up to kLanes lines at once, bit for bit: a factor of exactly 1 changes nothing. The lines do not see each
// other: they lie side by side so that one exp serves all factors and no branch is guessed wrong. The way for many.
QUIRE_INLINE void weigh(const AttentionCall& call, const Work& work, int64_t line, int count) {
    float tops[kLanes] = {}, olds[kLanes] = {}, unders[kLanes], factors[kLanes];
    for (int l = 0; l < count; ++l) {
        float* scores = work.weights + (line + l) * call.block_size;
        tops[l] = top_score(call, scores, work.begin[line + l], work.end[line + l]);
        olds[l] = work.peaks[line + l];
    }
    const F top = load<kLanes>(tops), old = load<kLanes>(olds), peak = top > old ? top : old;
    const F under = peak == -kInfinity ? F{} : peak;
    store(unders, under);
    store(factors, exp_of<kLanes>(old - under));  // exactly 1 where the peak stays
    store(olds, peak);
    for (int l = 0; l < count; ++l) {
        float *scores = work.weights + (line + l) * call.block_size, *totals = work.totals + (line + l) * kLanes;
        weigh_under(call, scores, unders[l], load<kLanes>(totals) * factors[l], totals);
        work.peaks[line + l] = olds[l];
        if (factors[l] != 1.0f) scale_by(work.sums + (line + l) * call.value_size, call.value_size, factors[l]);
    }
}

// Add the weighted values of slots [begin, end) to R lines: N vectors of L lanes. The sums lie as the vectors do, two
// and two (`load_two`): `end_tile` puts them in order.
template <int R, int N, int L, typename T>
QUIRE_INLINE void sum_panel(const AttentionCall& call, const float* weights, const T* values, float* sums, int begin,
                            int end, const T* ahead) {
    typedef typename Lanes<L>::F V;
    V total[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[r][n] = load<L>(sums + int64_t{r} * call.value_size + n * L);
    for (int slot = begin; slot < end; ++slot) {
        V value[N];
        if (ahead != nullptr) ask_for<N * L * sizeof(T)>(ahead + int64_t{slot} * call.value_size);
        load_vectors<N, L>(values + int64_t{slot} * call.value_size, value);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const V weight = splat<L>(weights[int64_t{r} * call.block_size + slot]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) total[r][n] = fused(weight, value[n], total[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + int64_t{r} * call.value_size + n * L, total[r][n]);
}

template <int R, typename T>
void sum_lines(const AttentionCall& call, const float* weights, const T* values, float* sums, int begin, int end,
               const T* ahead) {
    int at = 0;
    for (; at + kSumVectors * kLanes <= call.value_size; at += kSumVectors * kLanes)
        sum_panel<R, kSumVectors, kLanes>(call, weights, values + at, sums + at, begin, end, moved(ahead, at));
    for (; at + kLanes <= call.value_size; at += kLanes)
        sum_panel<R, 1, kLanes>(call, weights, values + at, sums + at, begin, end, moved(ahead, at));
    if constexpr (kLanes > kHeadStep)
        if (at < call.value_size)
            sum_panel<R, 1, kHeadStep>(call, weights, values + at, sums + at, begin, end, moved(ahead, at));
}

template <typename T, int R = kSumRows>
void sum(int count, const AttentionCall& call, const Work& work, int64_t line, const T* values, int begin, int end,
         const T* ahead) {
    if constexpr (R > 0) {
        if (count == R)
            return sum_lines<R>(call, work.weights + line * call.block_size, values,
                                work.sums + line * call.value_size, begin, end, ahead);
        sum<T, R - 1>(count, call, work, line, values, begin, end, ahead);
    }
}

// Lines [line, line + count): what all see is summed together, the edges line by line; each line still goes in order.
// Of the next values, slots before `asked` were asked for before.
template <typename T>
QUIRE_INLINE void sum_visible(const AttentionCall& call, const Work& work, int64_t line, int count, const T* values,
                              const T* ahead, int asked) {
    int begin = 0, end = call.block_size;
    for (int64_t l = line; l < line + count; ++l) {
        begin = work.begin[l] > begin ? work.begin[l] : begin;
        end = work.end[l] < end ? work.end[l] : end;
    }
    if (begin > end) end = begin;
    for (int64_t l = line; l < line + count && begin > 0; ++l) {
        const int own = work.begin[l], stop = work.end[l];
        if (own < begin) sum<T>(1, call, work, l, values, own, stop < begin ? stop : begin, nullptr);
    }
    const int quiet = asked < begin ? begin : asked < end ? asked : end;
    if (begin < quiet) sum<T>(count, call, work, line, values, begin, quiet, nullptr);
    if (quiet < end) sum<T>(count, call, work, line, values, quiet, end, ahead);
    for (int64_t l = line; l < line + count && end < call.block_size; ++l) {
        const int own = work.begin[l], stop = work.end[l];
        if (stop > end) sum<T>(1, call, work, l, values, own > end ? own : end, stop, nullptr);
    }
}

template <typename T>
struct Block {
    const T* keys;
    const T* values;
};

template <typename T>
QUIRE_INLINE Block<T> block_of(const AttentionCall& call, int head, int32_t block) {
    const int64_t size = int64_t{call.block_size};
    return {static_cast<const T*>(call.keys) + block * call.key_block_stride + head * (size * call.key_size),
            static_cast<const T*>(call.values) + block * call.value_block_stride + head * (size * call.value_size)};
}

// Lines [line, line + count), all of which see something of the block.
template <typename T>
void meet(const AttentionCall& call, const Work& work, int64_t line, int64_t count, Block<T> block, Block<T> next) {
    for (int64_t at = line; at < line + count; at += kScoreRows) {
        const int64_t left = line + count - at;
        score<T>(left < kScoreRows ? int(left) : kScoreRows, work.queries + at * call.key_size, call.key_size,
                 block.keys, call.block_size, work.weights + at * call.block_size, at == line ? next.keys : nullptr);
    }
    int asked = 0;
    for (int64_t at = line; at < line + count && count < kScoreRows; ++at) {
        for (int slot = 0; slot < kAskedByLine && next.values != nullptr; ++slot, ++asked)
            for (int of = 0; of < call.value_size; of += 64 / int(sizeof(T)))
                ask_for<64>(next.values + int64_t{asked} * call.value_size + of);
        weigh_one(call, work, at);
    }
    for (int64_t at = line; at < line + count && count >= kScoreRows; at += kLanes)
        weigh(call, work, at, line + count - at < kLanes ? int(line + count - at) : kLanes);
    for (int64_t at = line; at < line + count; at += kSumRows) {
        const int64_t left = line + count - at;
        sum_visible<T>(call, work, at, left < kSumRows ? int(left) : kSumRows, block.values,
                       at == line ? next.values : nullptr, asked);
    }
}

QUIRE_INLINE int first_seen(const AttentionCall& call, const Member& member) {
    const int first = call.window < 0 ? 0 : member.position - call.window + 1;
    return first > 0 ? first : 0;
}

// Units of work, a tile and a KV head each, as threads take them. A thread takes its next one when it begins the last
// block of the one at hand, so that the memory of that unit is asked for too.
class Units {
  public:
    Units(const AttentionCall& call, int64_t& taken) : call_(call), taken_(taken) {}

    // The unit to do now, or the number of units if none is left.
    int64_t take() {
        const int64_t unit = next_ >= 0 ? next_ : fetch();
        next_ = -1;
        return unit;
    }

    // Where the unit after this one begins; null if there is none.
    template <typename T>
    Block<T> upcoming() {
        if (next_ < 0) next_ = fetch();
        if (next_ >= call_.num_tiles * call_.num_kv_heads) return Block<T>{};
        const Member& member = call_.members[call_.tiles[next_ / call_.num_kv_heads].first_member];
        const int32_t* table = call_.tables + member.table;
        return block_of<T>(call_, int(next_ % call_.num_kv_heads), table[first_seen(call_, member) / call_.block_size]);
    }

  private:
    int64_t fetch() {
        int64_t unit;
#pragma omp atomic capture
        unit = taken_++;
        return unit;
    }

    const AttentionCall& call_;
    int64_t& taken_;
    int64_t next_ = -1;
};

// Members [first, first + count) go through entries [from, to) of one table; `after` that comes another block, or none
// of this tile (null): then the next unit.
template <typename T>
void walk(const AttentionCall& call, const Work& work, const Member* members, int first, int count, int head,
          const int32_t* table, int from, int to, Units& units, Block<T> after) {
    const int group = call.num_heads / call.num_kv_heads;
    for (int number = from; number < to; ++number) {
        const Block<T> block = block_of<T>(call, head, table[number]);
        const Block<T> next = number + 1 < to          ? block_of<T>(call, head, table[number + 1])
                              : after.keys != nullptr ? after
                                                      : units.upcoming<T>();
        const int offset = number * call.block_size;
        int run = first;  // members that see something of this block, as long as they are neighbours
        for (int m = first; m < first + count; ++m) {
            const int before = first_seen(call, members[m]) - offset, after_it = members[m].position + 1 - offset;
            const int begin = before > 0 ? before : 0;
            const int end = after_it < call.block_size ? after_it : call.block_size;
            for (int64_t line = int64_t{m} * group; line < int64_t{m + 1} * group; ++line) {
                work.begin[line] = begin;
                work.end[line] = end;
            }
            if (begin < end) continue;
            if (run < m) meet<T>(call, work, int64_t{run} * group, int64_t{m - run} * group, block, next);
            run = m + 1;
        }
        const int left = first + count - run;
        if (left > 0) meet<T>(call, work, int64_t{run} * group, int64_t{left} * group, block, next);
    }
}

QUIRE_INLINE void begin_tile(const AttentionCall& call, const Work& work, const Member* members, int count, int head) {
    const int group = call.num_heads / call.num_kv_heads;
    for (int64_t line = 0; line < int64_t{count} * group; ++line) {
        const Member& member = members[line / group];
        const int64_t of_head = (head * group + line % group) * call.key_size;
        const float* query = call.queries + member.row * call.query_stride + of_head;
        float* scaled = work.queries + line * call.key_size;
        for (int i = 0; i < call.key_size; ++i) scaled[i] = query[i] * call.scale;
        float* sums = work.sums + line * call.value_size;
        for (int i = 0; i < call.value_size; ++i) sums[i] = 0.0f;
        store(work.totals + line * kLanes, F{});
        work.peaks[line] = -kInfinity;
    }
}

template <typename T>
QUIRE_INLINE void end_tile(const AttentionCall& call, const Work& work, const Member* members, int count, int head) {
    const int group = call.num_heads / call.num_kv_heads;
    for (int64_t line = 0; line < int64_t{count} * group; ++line) {
        const Member& member = members[line / group];
        float* out = call.out + member.row * call.out_stride + (head * group + line % group) * call.value_size;
        const float total = sum_lanes<kLanes>(load<kLanes>(work.totals + line * kLanes));
        float* sums = work.sums + line * call.value_size;
        if constexpr (paired<T>)
            for (int at = 0; at + kSumVectors * kLanes <= call.value_size; at += kSumVectors * kLanes)
                for (int n = 0; n < kSumVectors; n += 2) {
                    F even = load<kLanes>(sums + at + n * kLanes), odd = load<kLanes>(sums + at + (n + 1) * kLanes);
                    in_order<kLanes>(even, odd);
                    store(sums + at + n * kLanes, even);
                    store(sums + at + (n + 1) * kLanes, odd);
                }
        for (int i = 0; i < call.value_size; ++i) out[i] = sums[i] / total;
    }
}

// The first entry that a member meets alone, and one past the last.
struct Own {
    int from, to;
};

QUIRE_INLINE Own own_of(const AttentionCall& call, const Tile& tile, const Member& member) {
    const int first = first_seen(call, member) / call.block_size;
    return {first > tile.num_shared ? first : tile.num_shared, member.position / call.block_size + 1};
}

// Where the first of members [from, ...) that has blocks of its own begins them; null if none has.
template <typename T>
QUIRE_INLINE Block<T> next_own(const AttentionCall& call, const Tile& tile, const Member* members, int from, int head) {
    for (int m = from; m < tile.num_members; ++m) {
        const Own own = own_of(call, tile, members[m]);
        if (own.from < own.to) return block_of<T>(call, head, call.tables[members[m].table + own.from]);
    }
    return Block<T>{};
}

template <typename T>
void attend_tile(const AttentionCall& call, const Tile& tile, int head, char* scratch, Units& units) {
    const Work work = cut(call, tile, scratch);
    const Member* members = call.members + tile.first_member;
    begin_tile(call, work, members, tile.num_members, head);
    int seen = first_seen(call, members[0]);
    for (int m = 1; m < tile.num_members; ++m) {
        const int first = first_seen(call, members[m]);
        seen = first < seen ? first : seen;
    }
    walk<T>(call, work, members, 0, tile.num_members, head, call.tables + members[0].table, seen / call.block_size,
            tile.num_shared, units, next_own<T>(call, tile, members, 0, head));
    for (int m = 0; m < tile.num_members; ++m) {
        const Own own = own_of(call, tile, members[m]);
        if (own.from < own.to)
            walk<T>(call, work, members, m, 1, head, call.tables + members[m].table, own.from, own.to, units,
                    next_own<T>(call, tile, members, m + 1, head));
    }
    end_tile<T>(call, work, members, tile.num_members, head);
}

}  // namespace

void attention(const AttentionCall& call) {
    const int64_t num_units = call.num_tiles * call.num_kv_heads;
    int64_t taken = 0;
#pragma omp parallel num_threads(call.num_threads) if (num_units > 1)
    {
        char* scratch = call.scratch + omp_get_thread_num() * call.scratch_bytes;
        Units units(call, taken);
        for (int64_t unit = units.take(); unit < num_units; unit = units.take()) {
            const Tile& tile = call.tiles[unit / call.num_kv_heads];
            const int head = int(unit % call.num_kv_heads);
            if (call.kv_type == KVType::float32)
                attend_tile<float>(call, tile, head, scratch, units);
            else
                attend_tile<bf16>(call, tile, head, scratch, units);
        }
    }
    for (int64_t row = call.num_rows; row < call.num_padded_rows; ++row)
        for (int i = 0; i < call.num_heads * call.value_size; ++i) call.out[row * call.out_stride + i] = 0.0f;
}

}  // namespace quire::QUIRE_ISA
