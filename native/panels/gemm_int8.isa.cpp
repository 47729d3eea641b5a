// Integer arithmetic: rows are quantized by groups, dot products of groups are exact and added in float32, in order.
//
//     sum = fma(fl(dot * weight scale), row scale, sum)             for each scale of a group
//     sum = fma(minimum, -fl(row scale * sum of inputs), sum)       if the format has minima
//
// All builds use these operations, so they return the same bits. With fused operations, a dot product needs no
// conversion to float: its sum starts from the bits of 1.5 * 2^23, and the fused multiplication with the scale also
// subtracts 1.5 * 2^23 times the scale. That term is exact because scales have at most 22 bits.
#include "panels/gemm_common.isa.hpp"
#include "panels/dequantize.isa.hpp"
#include "panels/quantize_inputs.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;

constexpr int kVectorsPerPanel = kWidth / kLanes;  // vectors of a panel
constexpr int kPanels = kLanes == 16 ? 2 : 1;
constexpr int kVectors = kPanels * kVectorsPerPanel;
constexpr int64_t kRowsInL2 = 32 * kTileRows;
constexpr int64_t kGroups = 8;          // groups decoded at a time
constexpr int64_t kPrefetchBytes = 6144;  // prefetch distance in each panel

#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
constexpr bool kHasFused = true;
#else
constexpr bool kHasFused = false;
#endif

// a * b + c with one rounding on all CPUs.
QUIRE_INLINE F exact_fma(F a, F b, F c) {
    if constexpr (kHasFused) return fma_of(a, b, c);
    for (int l = 0; l < kLanes; ++l) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
}

// dot * scale with one rounding; `sum` is the dot product plus kMagicRoundBits.
QUIRE_INLINE F scale_sum(Sums sum, F scale, F lift) {
    if constexpr (kHasFused) return fma_of((F)sum, scale, lift);
    return __builtin_convertvector(sum - kMagicRoundBits, F) * scale;
}

// The weights that are multiplied with a part of the rows.
struct Weights {
    const uint8_t* codes[kPanels];
    const GroupScales* scales;  // [panel][kGroups]
    int64_t count;
    int64_t codes_step;             // bytes per group
    // Addresses to prefetch. Only the first of several parts would wait for memory, so each part prefetches a share.
    const uint8_t* prefetch[kPanels];
    int64_t prefetch_step;             // bytes per group
    int64_t prefetch_begin, prefetch_end;     // groups during which this part prefetches
};

// Requirements of a format: two scales per group (`halves`), a minimum (`term`), packed 4-bit codes read from the panel
// (`nibbles`), and the number of vectors of product pairs added in 16 bits (`pair_sums`).
template <bool halves, bool term, bool nibbles, int pair_sums>
struct Kind {
    static constexpr bool has_halves = halves, has_term = term, has_nibbles = nibbles;
    static constexpr int num_vectors = halves ? 4 : 8;  // vectors of inputs per scale
    static constexpr int num_pair_sums = pair_sums < num_vectors ? pair_sums : num_vectors;
};

// Whether codes are packed 4-bit values that a kernel can multiply without a table.
QUIRE_INLINE constexpr bool has_nibbles(Format format) {
    return traits_of(format).codes == Codes::linear && traits_of(format).code_bits == 4;
}

template <Format format, bool reads_nibbles>
constexpr auto kind_of() {
    constexpr FormatTraits traits = traits_of(format);
    constexpr int pair_sums = pair_limit(format);
    static_assert(pair_sums * 2 * kLargestInput * largest_code(format) <= INT16_MAX);
    return Kind<traits.scales == Scales::super_halves, traits.term != Term::none, reads_nibbles, pair_sums>{};
}

// Vector k of a group's codes, from byte `first_byte` on.
template <bool has_nibbles>
QUIRE_INLINE Words codes_of(const uint8_t* group, int k, int first_byte) {
    Words words;
    __builtin_memcpy(&words, group + (has_nibbles ? k % 4 : k) * kCacheLineBytes + first_byte, sizeof words);
    return has_nibbles ? words >> (k / 4 * 4) & 0x0F0F0F0Fu : words;
}

// Computes the dot products from byte products; several pair sums are added in 16 bits before they are widened.
template <int R, typename Kind, typename Math, typename LoadCodes>
QUIRE_INLINE void multiply_pairs(const LoadCodes& load, const RowGroup& rows, int half, Sums (&sums)[R][kVectors]) {
#pragma GCC unroll 4
    for (int first = 4 * half; first < 4 * half + Kind::num_vectors; first += Kind::num_pair_sums) {
        typename Math::Pairs pairs[R][kVectors];
#pragma GCC unroll 8
        for (int k = first; k < first + Kind::num_pair_sums; ++k) {
            Words codes[kVectors];
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) codes[v] = keep_in_register(load(k, v));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) {
                    const typename Math::Pairs new_pairs = Math::products(codes[v], rows.inputs[r][k]);
                    pairs[r][v] = k == first ? new_pairs : pairs[r][v] + new_pairs;
                }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] + Math::widen(pairs[r][v]);
    }
}

// Computes the dot products of R rows with half of group g or all of it, added to the rows' start values.
template <int R, typename Kind>
QUIRE_INLINE void multiply(const Weights& weights, const RowGroup& rows, int64_t g, int half, Sums (&sums)[R][kVectors]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = rows.starts[half][r] - Sums{};
    const auto load_codes = [&](int k, int v) {
        return codes_of<Kind::has_nibbles>(weights.codes[v / kVectorsPerPanel] + g * weights.codes_step, k,
                                           v % kVectorsPerPanel * kLanes * 4);
    };
    if constexpr (Kind::num_pair_sums > 0) return multiply_pairs<R, Kind, PairMath>(load_codes, rows, half, sums);
#pragma GCC unroll 8
    for (int k = 4 * half; k < 4 * half + Kind::num_vectors; ++k) {
        DotOperand codes[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) codes[v] = make_operand(load_codes(k, v));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v)
                sums[r][v] = dot(sums[r][v], codes[v], rows.inputs[r] + k * kWordsPerGroup / 8);
    }
}

// A group has at least four cache lines, because no format has fewer than four bits.
QUIRE_INLINE void prefetch_group(const Weights& weights, int64_t g) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
        const uint8_t* address = weights.prefetch[p] + g * weights.prefetch_step;
#pragma GCC unroll 4
        for (int line = 0; line < 4; ++line) __builtin_prefetch(address + line * kCacheLineBytes);
        for (int64_t offset = 4 * kCacheLineBytes; offset < weights.prefetch_step; offset += kCacheLineBytes) __builtin_prefetch(address + offset);
    }
}

template <int R, typename Kind>
void micro_kernel(const Weights& weights, const RowGroup* rows, float* to) {
    F total[R][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) total[r][v] = load<kLanes>(to + (r * kVectors + v) * kLanes);
    for (int64_t g = 0; g < weights.count; ++g, ++rows) {
        if (g >= weights.prefetch_begin && g < weights.prefetch_end) prefetch_group(weights, g);
#pragma GCC unroll 2
        for (int half = 0; half < (Kind::has_halves ? 2 : 1); ++half) {
            Sums sums[R][kVectors];
            multiply<R, Kind>(weights, *rows, g, half, sums);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) {
                const GroupScales& group = weights.scales[v / kVectorsPerPanel * kGroups + g];
                const F scale = load<kLanes>(group.scales[half] + v % kVectorsPerPanel * kLanes), lift = scale * -kMagicRound;
                [[maybe_unused]] F term;
                if constexpr (Kind::has_term) term = load<kLanes>(group.term + v % kVectorsPerPanel * kLanes);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) {
                    total[r][v] = exact_fma(scale_sum(sums[r][v], scale, lift),
                                             splat<kLanes>(rows->scales[r]), total[r][v]);
                    if constexpr (Kind::has_term)
                        total[r][v] = exact_fma(term, splat<kLanes>(rows->sums[r]), total[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(to + (r * kVectors + v) * kLanes, total[r][v]);
}

typedef void (*MicroKernel)(const Weights&, const RowGroup*, float*);

template <typename Kind>
MicroKernel kernels_for(int64_t count) {
    switch (count) {
        case 1: return micro_kernel<1, Kind>;
        case 2: return micro_kernel<2, Kind>;
    }
    if constexpr (kTileRows > 2) switch (count) {
        case 3: return micro_kernel<3, Kind>;
        case 4: return micro_kernel<4, Kind>;
    }
    if constexpr (kTileRows > 4) switch (count) {
        case 5: return micro_kernel<5, Kind>;
        case 6: return micro_kernel<6, Kind>;
    }
    return nullptr;
}

// Formats of one kind share their kernels.
template <int index = 0>
MicroKernel find_kernel(Format format, bool reads_nibbles, int64_t count) {
    if constexpr (index < static_cast<int>(Format::count)) {
        constexpr Format candidate = static_cast<Format>(index);
        if (candidate != format) return find_kernel<index + 1>(format, reads_nibbles, count);
        if constexpr (has_nibbles(candidate))
            if (reads_nibbles) return kernels_for<decltype(kind_of<candidate, true>())>(count);
        if constexpr (is_coded(candidate)) return kernels_for<decltype(kind_of<candidate, false>())>(count);
    }
    return nullptr;
}

// Where kernels read codes: in the panel (codes are bytes, or 4-bit and there are few rows), or decoded in a buffer.
enum class CodeAccess { bytes, nibbles, decoded };

CodeAccess code_access_for(Format format, int64_t parts) {
    if (traits_of(format).codes == Codes::linear && traits_of(format).code_bits == 8) return CodeAccess::bytes;
    return has_nibbles(format) && parts <= 2 ? CodeAccess::nibbles : CodeAccess::decoded;
}

// Quantized rows, [part][group], with `part_size` rows per part.
struct Rows {
    const RowGroup* groups;
    int64_t part_size, num_groups;
};

// Decoded groups of kPanels panels.
struct DecodedGroups {
    GroupCodes codes[kPanels][kGroups];
    GroupScales scales[kPanels][kGroups];
};

// Converts zero points to minima: scale * (code - zero) = scale * code - minimum. External scales are cut to 22 bits.
QUIRE_INLINE void make_minima(GroupScales* groups, int64_t count) {
    for (GroupScales* group = groups; group < groups + count; ++group)
        for (int v = 0; v < kVectorsPerPanel; ++v) {
            float *scale = group->scales[0] + v * kLanes, *term = group->term + v * kLanes;
            const F short_scale = (F)((Words)load<kLanes>(scale) & ~3u);
            store(scale, short_scale);
            store(term, load<kLanes>(term) * short_scale);
        }
}

// A task: multiplies some parts of the rows with kPanels panels.
struct Task {
    const PanelCall& call;
    const PanelLayout layout;
    const Rows rows;
    CodeAccess access;
    int64_t begin, end, panel;  // parts, and the first panel
};

// Decodes groups from `first` on.
QUIRE_INLINE void prepare(const Task& task, int64_t first, DecodedGroups& decoded, Weights& weights) {
    const Dequantizer& decoder = decoder_of(task.call.shape.format);
    for (int p = 0; p < kPanels; ++p) {
        const uint8_t* codes = task.layout.codes(task.panel + p, first * kGroupInputs);
        const GroupRange span = {task.call.shape, task.layout.panel(task.panel + p), first, weights.count};
        if (task.access == CodeAccess::decoded) decoder.codes(span, decoded.codes[p]);
        decoder.scales(span, decoded.scales[p]);
        if (is_external(task.call.shape.traits().scales)) make_minima(decoded.scales[p], weights.count);
        weights.codes[p] = task.access == CodeAccess::decoded ? decoded.codes[p][0].bytes[0] : codes;
        weights.prefetch[p] = task.layout.codes_after(task.panel + p, first * kGroupInputs, kPrefetchBytes, kPanels);
    }
}

void run_task(const Task& task) {
    const Rows& rows = task.rows;
    const int64_t parts = task.end - task.begin, groups_per_part = (kGroups + parts - 1) / parts;
    const int64_t first_row = task.begin * rows.part_size;
    const int64_t num_rows = min_of(task.end * rows.part_size, task.call.num_rows) - first_row;
    const MicroKernel kernel = find_kernel(task.call.shape.format, task.access == CodeAccess::nibbles, rows.part_size);
    const MicroKernel last_kernel = find_kernel(task.call.shape.format, task.access == CodeAccess::nibbles, num_rows - (parts - 1) * rows.part_size);
    DecodedGroups decoded;
    alignas(64) float sums[kRowsInL2 * kVectors * kLanes];
    __builtin_memset(sums, 0, static_cast<size_t>(num_rows * kVectors * kLanes) * sizeof(float));
    Weights weights;
    weights.scales = decoded.scales[0];
    weights.prefetch_step = task.layout.group_bytes;
    weights.codes_step = task.access == CodeAccess::decoded ? int64_t{sizeof(GroupCodes)} : weights.prefetch_step;
    for (int64_t first = 0; first < rows.num_groups; first += kGroups) {
        weights.count = min_of(kGroups, rows.num_groups - first);
        prepare(task, first, decoded, weights);
        for (int64_t part = 0; part < parts; ++part) {
            weights.prefetch_begin = part * groups_per_part;
            weights.prefetch_end = weights.prefetch_begin + groups_per_part;
            (part + 1 < parts ? kernel : last_kernel)(weights, rows.groups + (task.begin + part)
                                                               * rows.num_groups + first,
                                            sums + part * rows.part_size * kVectors * kLanes);
        }
    }
    write_sums(task.call, first_row, num_rows, task.panel * kWidth, sums, kVectors * kLanes);
}

Rows rows_of(const PanelCall& call) {
    return {reinterpret_cast<const RowGroup*>(call.scratch), rows_per_part(call.num_rows, kTileRows),
            call.shape.num_in / kGroupInputs};
}

// The tasks of a call: one per combination of a set of row parts and a set of kPanels panels.
struct TaskGrid {
    int64_t num_parts, row_sets, panel_sets;

    explicit TaskGrid(const PanelCall& call) {
        const int64_t part_size = rows_per_part(call.num_rows, kTileRows), max_parts = kRowsInL2 / kTileRows;
        num_parts = (call.num_rows + part_size - 1) / part_size;
        row_sets = (num_parts + max_parts - 1) / max_parts;
        panel_sets = (call.shape.num_panels() + kPanels - 1) / kPanels;
    }
};

}  // namespace

int64_t panel_scratch_bytes(ComputeType arithmetic, int64_t num_rows, int64_t num_in) {
    if (arithmetic == ComputeType::floating) return 0;
    const int64_t part_size = rows_per_part(num_rows, kTileRows), num_parts = (num_rows + part_size - 1) / part_size;
    return num_parts * (num_in / kGroupInputs) * static_cast<int64_t>(sizeof(RowGroup));
}

void panel_quantise(const PanelCall& call, int64_t row, int64_t first, int64_t end) {
    const FormatTraits& traits = call.shape.traits();
    const InputForm format = {traits.offset, traits.scales == Scales::super_halves, pair_limit(call.shape.format) > 0};
    const Rows rows = rows_of(call);
    RowGroup* to = reinterpret_cast<RowGroup*>(call.scratch) + row / rows.part_size * rows.num_groups;
    for (int64_t group = first / kGroupInputs; group < end / kGroupInputs; ++group)
        quantise_group(call.rows + row * call.row_stride + group * kGroupInputs, format, to[group],
                       static_cast<int>(row % rows.part_size));
}

int64_t panel_integer_tasks(const PanelCall& call) {
    const TaskGrid grid(call);
    return grid.panel_sets * grid.row_sets;
}

void panel_integers(const PanelCall& call, int64_t task) {
    const TaskGrid grid(call);
    const int64_t set = task / grid.panel_sets;
    const int64_t begin = grid.num_parts * set / grid.row_sets, end = grid.num_parts * (set + 1) / grid.row_sets;
    const CodeAccess access = code_access_for(call.shape.format, end - begin);
    run_task({call, PanelLayout(call), rows_of(call), access, begin, end, task % grid.panel_sets * kPanels});
}

}  // namespace quire::QUIRE_ISA
