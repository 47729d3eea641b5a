// Attention of some lines of a tile over one block: scores, softmax weights with a running maximum, weighted sums of
// values. A line is one query head of one query row. Included only by attention.isa.cpp, which decides which lines
// process which blocks, and in what order.
//
// The score of a slot is summed over the head's dimensions in order, with vectors across slots. Values are summed slot
// by slot, with vectors across the head's dimensions. The number of lines in registers does not change the result bits.
// Masked slots may contain anything, including NaN: their scores are replaced, and their values are never read. With
// int8, sums run over quantized codes: a slot's score is multiplied by the scale of its key, and its weight by the scale
// of its value before values are summed.
#pragma once

#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;
typedef Lanes<kLanes>::I I;

// Register tiles: lines x vectors of scores, lines x vectors of sums. They have enough accumulators to hide the latency
// of an addition, and leave a register free for the broadcast query or weight.
constexpr bool kManyRegisters = kRegisters > 16;
constexpr int kScoreVectors = 2, kScoreLines = kManyRegisters ? 12 : 6, kSumVectors = kManyRegisters ? 4 : 2, kSumLines = 6;
// Strides between lines, as compile-time constants. Not powers of two, which would cause cache set conflicts.
constexpr int kQueryStride = kMaxHeadSize + 16, kWeightStride = 64 + 16;
constexpr int kFewLines = 8;  // with fewer lines, memory bandwidth is the bottleneck
constexpr float kInfinity = __builtin_inff();

// Intermediate results of a tile. The lines of a query row are consecutive.
struct TileScratch {
    float* queries;  // [line, kQueryStride], scaled
    float* sums;     // [line, value size]
    float* weights;  // [line, kWeightStride]: scores, then weights of the current block
    float* totals;   // [line, kLanes]
    float* peaks;    // [line], padded by one vector
    float* factors;  // [line], padded by one vector: factors that rescale the sums of earlier blocks
    int32_t* begin;  // [line]: slots [begin, end) of the current block that the line attends to; stored per line,
    int32_t* end;    // because to divide a line index by the heads per row is slow
    float* merged_records;  // [line]: results of earlier segments (a record: see attention.isa.cpp)
    float* segment_record;   // one record: result of the current segment
};

QUIRE_INLINE int64_t pad_to_cache_line(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

TileScratch split_scratch(const AttentionCall& call, const QueryTile& tile, char* scratch) {
    const int64_t lines = int64_t{tile.num_members} * (call.num_heads / call.num_kv_heads);
    auto take = [&scratch](int64_t count) {
        char* part = scratch;
        scratch += pad_to_cache_line(4 * count);
        return part;
    };
    TileScratch work;
    work.queries = reinterpret_cast<float*>(take(lines * kQueryStride));
    work.sums = reinterpret_cast<float*>(take(lines * call.value_size));
    work.weights = reinterpret_cast<float*>(take(lines * kWeightStride));
    work.totals = reinterpret_cast<float*>(take(lines * kLanes));
    work.peaks = reinterpret_cast<float*>(take(lines + kLanes));
    work.factors = reinterpret_cast<float*>(take(lines + kLanes));
    work.begin = reinterpret_cast<int32_t*>(take(lines));
    work.end = reinterpret_cast<int32_t*>(take(lines));
    work.merged_records = reinterpret_cast<float*>(take(lines * (call.value_size + 2)));
    work.segment_record = reinterpret_cast<float*>(take(call.value_size + 2));
    return work;
}

// Prefetches `Bytes` bytes of the next block, called in each step of the current block: prefetching the whole block at
// once would stall. The target is L2, because L1 allows too few outstanding requests to saturate memory bandwidth.
template <int Bytes>
QUIRE_INLINE void prefetch_bytes(const void* address) {
#pragma GCC unroll 8
    for (int i = 0; i < Bytes; i += 64) __builtin_prefetch(static_cast<const char*>(address) + i,
                                                                          0, 2);
}

// Softmax uses no memory bandwidth. So with few lines, the softmax of each line prefetches this number of slots of the
// next block's values; the sum over values prefetches the other slots.
constexpr int kSlotsPrefetchedPerLine = 2;

template <typename T>
QUIRE_INLINE const T* advance_pointer(const T* address, int offset) {
    return address == nullptr ? nullptr : address + offset;
}

// Loads N vectors of L elements into registers, in pairs as `load_pair` returns them.
template <int N, int L, typename T>
QUIRE_INLINE void load_vectors(const T* from, typename Lanes<L>::F* to) {
#pragma GCC unroll 8
    for (int n = 0; n + 1 < N; n += 2) {
        load_pair<L>(from + n * L, to[n], to[n + 1]);
        to[n] = keep_in_register(to[n]);
        to[n + 1] = keep_in_register(to[n + 1]);
    }
    if constexpr (N % 2) to[N - 1] = keep_in_register(load<L>(from + (N - 1) * L));
}

// The keys of a block, or of its slots starting at some slot. `next` is the same position in the next block, or null.
template <typename T>
struct Keys {
    const T* keys;
    const T* next;
    const float* scales;  // [slot] if keys are quantized, else null
    int key_size, block_size;
    int num_slots;  // slots to compute: up to the last slot that any line attends to

    Keys tail(int slot) const {
        const float* slot_scales = is_quantized<T> ? scales + slot : nullptr;
        return {keys + slot, advance_pointer(next, slot), slot_scales, key_size, block_size, num_slots - slot};
    }
};

// Computes the scores of R lines and N vectors of slots.
template <int R, int N, typename T>
QUIRE_INLINE void score_panel(const float* queries, const Keys<T>& block, float* scores) {
    const int64_t stride = block.block_size;
    const T *keys = block.keys, *next = block.next;
    F sums[R][N] = {};
    for (int i = 0; i < block.key_size; ++i, keys += stride) {
        F key[N];
        if (next != nullptr) prefetch_bytes<N * kLanes * sizeof(T)>(next + i * stride);
        load_vectors<N, kLanes>(keys, key);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F query = splat<kLanes>(queries[r * kQueryStride + i]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) sums[r][n] = fma_of(query, key[n], sums[r][n]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        if constexpr (is_deinterleaved<T>)
            for (int n = 0; n + 1 < N; n += 2) interleave<kLanes>(sums[r][n], sums[r][n + 1]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            if constexpr (is_quantized<T>) sums[r][n] = sums[r][n] * load<kLanes>(block.scales + n * kLanes);
            store(scores + r * kWeightStride + n * kLanes, sums[r][n]);
        }
    }
}

template <int R, typename T>
void score_lines(const float* queries, const Keys<T>& block, float* scores) {
    constexpr int slots_per_panel = kScoreVectors * kLanes;
    int slot = 0;
    for (; slot + slots_per_panel <= block.num_slots; slot += slots_per_panel)
        score_panel<R, kScoreVectors>(queries, block.tail(slot), scores + slot);
    if (slot < block.num_slots) score_panel<R, 1>(queries, block.tail(slot), scores + slot);
}

// Computes the scores of as many of `count` lines as one panel has: kScoreLines, or min(count, 8). Returns their number.
template <typename T, int R = kScoreLines>
int score(int64_t count, const float* queries, const Keys<T>& block, float* scores) {
    if constexpr (R > 1)
        if (count < R) return score<T, (R > 8 ? 8 : R - 1)>(count, queries, block, scores);
    score_lines<R>(queries, block, scores);
    return R;
}

// tanh by exp_of. The absolute error of a few 1e-8 is small enough for scores.
QUIRE_INLINE F tanh_of(F x) {
    const F magnitude = x < 0.0f ? -x : x;
    const F e = exp_of<kLanes>(magnitude * -2.0f);
    const F y = (1.0f - e) / (1.0f + e);
    return x < 0.0f ? -y : y;
}

// e^x by the polynomial of `exp_of`, with fused operations, because it takes much of the time.
QUIRE_INLINE F weight_of(F x) {
    typedef Lanes<kLanes>::U U;
    const F round = splat<kLanes>(12582912.0f), one = splat<kLanes>(1.0f);
    const F shifted = fma_of(x, splat<kLanes>(1.44269504088896341f), round);
    const F n = shifted - round;
    const F r = fma_of(n, splat<kLanes>(2.12194440e-4f), fma_of(n, splat<kLanes>(-0.693359375f), x));
    F y = fma_of(r, splat<kLanes>(1.9875691500e-4f), splat<kLanes>(1.3981999507e-3f));
    y = fma_of(y, r, splat<kLanes>(8.3334519073e-3f));
    y = fma_of(y, r, splat<kLanes>(4.1665795894e-2f));
    y = fma_of(y, r, splat<kLanes>(1.6666665459e-1f));
    y = fma_of(y, r, splat<kLanes>(5.0000001201e-1f));
    y = fma_of(fma_of(y, r, one), r, one);
    const U power = ((U)shifted - (0x4B400000u - 127u)) << 23;
    return x < -87.336f ? F{} : y * (F)power;
}

QUIRE_INLINE void scale_by(float* numbers, int size, float factor) {
    for (int i = 0; i < size; ++i) numbers[i] *= factor;
}

// In lane l, the maximum of lanes l and l ^ Step of one vector: of `a` if bit Step of l is clear, else of `b`.
template <int Step>
QUIRE_INLINE F max_across(F a, F b) {
    F same_lane, other_lane;
#if defined(__clang__)
    for (int l = 0; l < kLanes; ++l) {
        same_lane[l] = l & Step ? b[l] : a[l];
        other_lane[l] = l & Step ? b[l ^ Step] : a[l ^ Step];
    }
#else
    I same_index, other_index;
    for (int l = 0; l < kLanes; ++l) {
        same_index[l] = l & Step ? l + kLanes : l;
        other_index[l] = same_index[l] ^ Step;
    }
    same_lane = __builtin_shuffle(a, b, same_index);
    other_lane = __builtin_shuffle(a, b, other_index);
#endif
    return max_of(other_lane, same_lane);
}

// The maximum of all lanes, in every lane.
template <int Step = kLanes / 2>
QUIRE_INLINE F max_in_all_lanes(F v) {
    if constexpr (Step == 0)
        return v;
    else
        return max_in_all_lanes<Step / 2>(max_across<Step>(v, v));
}

// In lane l, the maximum of all lanes of vector l. Vectors are combined in pairs, first by halves of lanes:
//
//     a0 a1 a2 a3   and   b0 b1 b2 b3   ->   max(a0, a2) max(a1, a3) max(b0, b2) max(b1, b3)
template <int Step = kLanes / 2>
QUIRE_INLINE F line_maxima(F* vectors) {
    if constexpr (Step == 0) {
        return vectors[0];
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < Step; ++i) vectors[i] = max_across<Step>(vectors[i], vectors[i + Step]);
        return line_maxima<Step / 2>(vectors);
    }
}

// The elementwise maximum of a line's vectors of scores; the largest lane is the maximum score. Applies the softcap,
// and sets the scores of masked slots up to `num_slots` to -infinity.
QUIRE_INLINE F lane_maxima(const AttentionCall& call, float* scores, int begin, int end, int num_slots) {
    F maxima = splat<kLanes>(-kInfinity);
    if (begin == 0 && end == num_slots && call.softcap <= 0.0f) {  // most blocks: no mask and no softcap
        for (int slot = 0; slot < num_slots; slot += kLanes) maxima = max_of(load<kLanes>(scores + slot), maxima);
        return maxima;
    }
    I lane;
    for (int l = 0; l < kLanes; ++l) lane[l] = l;
    for (int slot = 0; slot < num_slots; slot += kLanes) {
        F s = load<kLanes>(scores + slot);
        if (call.softcap > 0.0f) s = tanh_of(s / call.softcap) * call.softcap;
        const I index = lane + slot;
        s = ((index >= begin) & (index < end)) ? s : splat<kLanes>(-kInfinity);
        store(scores + slot, s);
        maxima = max_of(s, maxima);
    }
    return maxima;
}

// Replaces a peak of -infinity (all scores of the line are NaN or masked) by zero, so that NaN minus the peak is NaN.
QUIRE_INLINE F finite_max(F peak) { return peak == -kInfinity ? F{} : peak; }

// Adds the weights of a block to the total weights, then multiplies each weight with the scale of its value, if any.
QUIRE_INLINE void accumulate_weights(float* weights, F total, float* totals, const float* scales, int num_slots) {
    for (int slot = 0; slot < num_slots; slot += kLanes) {
        const F weight = load<kLanes>(weights + slot);
        if (scales != nullptr) store(weights + slot, weight * load<kLanes>(scales + slot));
        total = total + weight;
    }
    store(totals, total);
}

QUIRE_INLINE void exp_scores(float* scores, F base, int num_slots) {
    for (int slot = 0; slot < num_slots; slot += kLanes)
        store(scores + slot, weight_of(load<kLanes>(scores + slot) - base));
}

// Online softmax of one line: converts scores to weights relative to the new peak, and rescales earlier sums if the
// peak changed, which is rare. Used for few lines.
QUIRE_INLINE void softmax_line(const AttentionCall& call, const TileScratch& work, int64_t line, const float* scales) {
    float *scores = work.weights + line * kWeightStride, *totals = work.totals + line * kLanes;
    const F block_peak = max_in_all_lanes(lane_maxima(call, scores, work.begin[line], work.end[line], call.block_size));
    const F old_peak = splat<kLanes>(work.peaks[line]), peak = max_of(block_peak, old_peak), base = finite_max(peak);
    F total = load<kLanes>(totals);
    if (peak[0] != old_peak[0]) {
        const float factor = weight_of(old_peak - base)[0];
        scale_by(work.sums + line * call.value_size, call.value_size, factor);
        total = total * factor;
        work.peaks[line] = peak[0];
    }
    exp_scores(scores, base, call.block_size);
    accumulate_weights(scores, total, totals, scales, call.block_size);
}

// Like softmax_line, for up to kLanes lines, with the same bits, because a factor of exactly 1 changes nothing. To
// avoid branches, peaks and factors are computed as vectors, and earlier sums are rescaled when values are added.
QUIRE_INLINE void softmax_lines(const AttentionCall& call, const TileScratch& work, int64_t line, int count, const float* scales,
                        int num_slots) {
    F maxima[kLanes];
    for (int l = 0; l < count; ++l) {
        float* scores = work.weights + (line + l) * kWeightStride;
        maxima[l] = lane_maxima(call, scores, work.begin[line + l], work.end[line + l], num_slots);
    }
    for (int l = count; l < kLanes; ++l) maxima[l] = splat<kLanes>(-kInfinity);
    float *peaks = work.peaks + line, *factors = work.factors + line, bases[kLanes];
    const F old_peak = load<kLanes>(peaks), peak = max_of(line_maxima(maxima), old_peak), base = finite_max(peak);
    store(peaks, peak);
    store(bases, base);
    store(factors, weight_of(old_peak - base));
    for (int l = 0; l < count; ++l) {
        float *weights = work.weights + (line + l) * kWeightStride, *totals = work.totals + (line + l) * kLanes;
        exp_scores(weights, splat<kLanes>(bases[l]), num_slots);
        accumulate_weights(weights, load<kLanes>(totals) * factors[l], totals, scales, num_slots);
    }
}

// The values of slots [begin, end) of a block, or some of their dimensions. `next` is the same position in the next
// block, or null. Sums are first multiplied with `factors` [line], unless null.
template <typename T>
struct Values {
    const T* values;
    const T* next;
    int begin, end;
    const float* factors;

    Values tail(int dim) const { return {values + dim, advance_pointer(next, dim), begin, end, factors}; }
};

// Adds weighted values to the sums of R lines: N vectors of L lanes. Sums are stored in the order of `load_pair`;
// attention.isa.cpp restores their order at the end.
template <int R, int N, int L, typename T>
QUIRE_INLINE void sum_panel(const AttentionCall& call, const float* weights, const Values<T>& block, float* sums) {
    typedef typename Lanes<L>::F V;
    V total[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[r][n] = load<L>(sums + int64_t{r} * call.value_size + n * L);
        if (block.factors == nullptr) continue;
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) total[r][n] = total[r][n] * block.factors[r];
    }
    const int64_t stride = call.value_size;
    const T *values = block.values + block.begin * stride, *next = block.next;
    for (int slot = block.begin; slot < block.end; ++slot, values += stride) {
        V value[N];
        if (next != nullptr) prefetch_bytes<N * L * sizeof(T)>(next + slot * stride);
        load_vectors<N, L>(values, value);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const V weight = splat<L>(weights[r * kWeightStride + slot]);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) total[r][n] = fma_of(weight, value[n], total[r][n]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store(sums + int64_t{r} * call.value_size + n * L, total[r][n]);
}

template <int R, typename T>
void sum_lines(const AttentionCall& call, const float* weights, const Values<T>& block, float* sums) {
    int dim = 0;
    for (; dim + kSumVectors * kLanes <= call.value_size; dim += kSumVectors * kLanes)
        sum_panel<R, kSumVectors, kLanes>(call, weights, block.tail(dim), sums + dim);
    for (; dim + kLanes <= call.value_size; dim += kLanes)
        sum_panel<R, 1, kLanes>(call, weights, block.tail(dim), sums + dim);
    if constexpr (kLanes > kHeadStep)
        if (dim < call.value_size) sum_panel<R, 1, kHeadStep>(call, weights, block.tail(dim), sums + dim);
}

template <typename T, int R = kSumLines>
void sum(int count, const AttentionCall& call, const TileScratch& work, int64_t line, const Values<T>& block) {
    if constexpr (R > 0) {
        if (count == R)
            return sum_lines<R>(call, work.weights + line * kWeightStride, block, work.sums + line * call.value_size);
        sum<T, R - 1>(count, call, work, line, block);
    }
}

// Sums the values of slots [block.begin, block.end), to which only some of the lines [line, line + count) attend.
// Consecutive lines with equal slots, such as all lines of a query row, are processed together.
template <typename T>
void sum_edges(const AttentionCall& call, const TileScratch& work, int64_t line, int count, const Values<T>& block) {
    for (int l = 0; l < count;) {
        const int from = work.begin[line + l], to = work.end[line + l], first = l;
        while (l < count && work.begin[line + l] == from && work.end[line + l] == to) ++l;
        const int begin = from > block.begin ? from : block.begin, end = to < block.end ? to : block.end;
        if (begin < end) sum<T>(l - first, call, work, line + first, {block.values, nullptr, begin, end, nullptr});
    }
}

// Sums values for lines [line, line + count): for all lines together where all attend to a slot, separately before and
// after these slots; each line in slot order. `num_prefetched` slots of the next block's values are already prefetched.
template <typename T>
void sum_visible(const AttentionCall& call, const TileScratch& work, int64_t line, int count, const Values<T>& block,
                 int num_prefetched) {
    int begin = block.begin, end = block.end;
    for (int64_t l = line; l < line + count; ++l) {
        begin = work.begin[l] > begin ? work.begin[l] : begin;
        end = work.end[l] < end ? work.end[l] : end;
    }
    if (begin == block.begin && end == block.end && num_prefetched == 0) return sum<T>(count, call, work, line, block);
    for (int l = 0; l < count && block.factors != nullptr; ++l)
        scale_by(work.sums + (line + l) * call.value_size, call.value_size, block.factors[l]);
    if (begin > end) end = begin;
    if (block.begin < begin)
        sum_edges<T>(call, work, line, count, {block.values, nullptr, block.begin, begin, nullptr});
    const int split = num_prefetched < begin ? begin : num_prefetched < end ? num_prefetched : end;
    if (begin < split) sum<T>(count, call, work, line, {block.values, nullptr, begin, split, nullptr});
    if (split < end) sum<T>(count, call, work, line, {block.values, block.next, split, end, nullptr});
    if (end < block.end) sum_edges<T>(call, work, line, count, {block.values, nullptr, end, block.end, nullptr});
}

template <typename T>
struct Block {
    const T* keys;
    const T* values;
};

// With int8, a head's codes are followed by one float scale per slot: as many bytes as four rows [slot] of codes.
template <typename T>
constexpr int kScaleRows = is_quantized<T> ? 4 : 0;

template <typename T>
QUIRE_INLINE Block<T> block_of(const AttentionCall& call, int head, int32_t block) {
    const int64_t size = call.block_size;
    const int64_t key_offset = head * size * (call.key_size + kScaleRows<T>);
    const int64_t value_offset = head * size * (call.value_size + kScaleRows<T>);
    return {static_cast<const T*>(call.keys) + block * call.key_block_stride + key_offset,
            static_cast<const T*>(call.values) + block * call.value_block_stride + value_offset};
}

template <typename T>
QUIRE_INLINE const float* scales_after_codes(const T* codes, int64_t count) {
    return is_quantized<T> ? reinterpret_cast<const float*>(codes + count) : nullptr;
}

// The number of slots up to the last slot that any of these lines attends to, rounded up to a multiple of kLanes.
QUIRE_INLINE int num_visible_slots(const TileScratch& work, int64_t line, int64_t count) {
    int end = 0;
    for (int64_t l = line; l < line + count; ++l) end = work.end[l] > end ? work.end[l] : end;
    return (end + kLanes - 1) / kLanes * kLanes;
}

// Processes a block for lines [line, line + count), each of which attends to some of its slots. With few lines, all
// slots are processed, so that all of the `next` block is prefetched.
template <typename T>
void attend_block(const AttentionCall& call, const TileScratch& work, int64_t line, int64_t count, Block<T> block, Block<T> next) {
    const bool has_few_lines = count < kFewLines;
    const int size = call.block_size, num_slots = has_few_lines ? size : num_visible_slots(work, line, count);
    Keys<T> keys = {block.keys, next.keys, scales_after_codes(block.keys, int64_t{size} * call.key_size),
                    call.key_size, size, num_slots};
    for (int64_t l = line; l < line + count; keys.next = nullptr)
        l += score<T>(line + count - l, work.queries + l * kQueryStride, keys, work.weights + l * kWeightStride);
    const float* scales = scales_after_codes(block.values, int64_t{size} * call.value_size);
    int num_prefetched = 0;
    for (int64_t l = line; l < line + count && has_few_lines; ++l) {
        for (int slot = 0; slot < kSlotsPrefetchedPerLine && next.values != nullptr; ++slot, ++num_prefetched)
            for (int offset = 0; offset < call.value_size; offset += 64 / int(sizeof(T)))
                prefetch_bytes<64>(next.values + int64_t{num_prefetched} * call.value_size + offset);
        softmax_line(call, work, l, scales);
    }
    for (int64_t l = line; l < line + count && !has_few_lines; l += kLanes)
        softmax_lines(call, work, l, line + count - l < kLanes ? int(line + count - l) : kLanes, scales, num_slots);
    Values<T> values = {block.values, next.values, 0, size, nullptr};
    for (int64_t l = line; l < line + count; l += kSumLines, values.next = nullptr) {
        const int64_t num_left = line + count - l;
        values.factors = has_few_lines ? nullptr : work.factors + l;
        sum_visible<T>(call, work, l, num_left < kSumLines ? int(num_left) : kSumLines, values, num_prefetched);
    }
}

}  // namespace
}  // namespace quire::QUIRE_ISA
