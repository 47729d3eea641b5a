// Float arithmetic: out = rows x weight^T + bias, with weights decoded to float32. Each format returns the same bits as
// float32 weights with equal values.
#include "panels/gemm_common.isa.hpp"
#include "panels/dequantize.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;

constexpr int kVectorsPerPanel = kWidth / kLanes;  // vectors of a panel
constexpr int kPanels = kLanes == 16 ? 3 : 1;
constexpr int kVectors = kPanels * kVectorsPerPanel;
constexpr int kTileRows = kRegisters > 16 ? (kLanes == 16 ? 9 : 6) : (kLanes == 8 ? 6 : 2);
constexpr int64_t kRowsInL2 = 32 * kTileRows;
constexpr int64_t kInputs = 1024;       // inputs decoded at a time for several parts of rows: 192 KiB
constexpr int64_t kFewInputs = 64;     // inputs decoded at a time for one part: 12 KiB
constexpr int64_t kPrefetchBytes = 2048;  // prefetch distance in each panel

// The weights to multiply with a part of the rows.
struct Weights {
    const uint8_t* values[kPanels];  // of the type `Kind` of the micro kernel
    int64_t num_inputs;
    const uint8_t* prefetch[kPanels];  // addresses to prefetch
    int64_t prefetch_step;             // bytes per input
    float* converted[kPanels];           // [input][16]: buffer for weights that the first of many parts has converted
};

// Weight types. load_vector() loads vector v of kVectors at input i.
struct Floats {
    static QUIRE_INLINE F load_vector(const Weights& weights, int64_t i, int v) {
        const uint8_t* from = weights.values[v / kVectorsPerPanel] + (i * kWidth + v % kVectorsPerPanel * kLanes) * 4;
        return load<kLanes>(reinterpret_cast<const float*>(from));
    }
};

struct Halves {
    static QUIRE_INLINE F load_vector(const Weights& weights, int64_t i, int v) {
        return load_halves<kLanes>(weights.values[v / kVectorsPerPanel] + (i * kWidth + v % kVectorsPerPanel * kLanes) * 2);
    }
};

struct Pairs {
    static QUIRE_INLINE F load_vector(const Weights& weights, int64_t i, int v) {
        Lanes<kLanes>::U pair;
        __builtin_memcpy(&pair, weights.values[v / kVectorsPerPanel] + (i / 2 * kWidth + v % kVectorsPerPanel * kLanes) * 4, sizeof pair);
        return (F)(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    }
};

// Adds the products of one input for R rows. If `stores_converted`, also stores the converted weights.
template <int R, typename Kind, bool stores_converted>
QUIRE_INLINE void add_input(const Weights& weights, int64_t i, const float* rows, int64_t stride,
                            F (&sum)[R][kVectors]) {
    F weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        weight[v] = keep_in_register(Kind::load_vector(weights, i, v));
        if constexpr (stores_converted) store(weights.converted[v / kVectorsPerPanel] + i * kWidth + v % kVectorsPerPanel * kLanes, weight[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const F input = splat<kLanes>(rows[r * stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = keep_in_register(fma_of(input, weight[v], sum[r][v]));
    }
}

// Multiplies R rows. Prefetches one cache line of each of the first N panels per two inputs.
template <int R, int N, typename Kind, bool stores_converted>
void micro_kernel(const Weights& weights, const float* rows, int64_t stride, float* sums) {
    F sum[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = load<kLanes>(sums + (r * kVectors + v) * kLanes);
    int64_t i = 0;
    for (; i + 2 <= weights.num_inputs; i += 2) {
        add_input<R, Kind, stores_converted>(weights, i, rows, stride, sum);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            __builtin_prefetch(weights.prefetch[n] + i * weights.prefetch_step);
            if (weights.prefetch_step > kCacheLineBytes / 2) __builtin_prefetch(weights.prefetch[n] + (i + 1) * weights.prefetch_step);
        }
        add_input<R, Kind, stores_converted>(weights, i + 1, rows, stride, sum);
    }
    if (i < weights.num_inputs) add_input<R, Kind, stores_converted>(weights, i, rows, stride, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

typedef void (*MicroKernel)(const Weights&, const float*, int64_t, float*);

template <int N, typename Kind, bool stores_converted>
MicroKernel micro_kernel_for(int64_t count) {
    switch (count) {
        case 1: return micro_kernel<1, N, Kind, stores_converted>;
        case 2: return micro_kernel<2, N, Kind, stores_converted>;
    }
    if constexpr (kTileRows > 2) switch (count) {
        case 3: return micro_kernel<3, N, Kind, stores_converted>;
        case 4: return micro_kernel<4, N, Kind, stores_converted>;
        case 5: return micro_kernel<5, N, Kind, stores_converted>;
        case 6: return micro_kernel<6, N, Kind, stores_converted>;
    }
    if constexpr (kTileRows > 6) switch (count) {
        case 7: return micro_kernel<7, N, Kind, stores_converted>;
        case 8: return micro_kernel<8, N, Kind, stores_converted>;
        case 9: return micro_kernel<9, N, Kind, stores_converted>;
    }
    return nullptr;
}

// How the parts of a task read weights. Float32: in place. 16 bits: each of at most two parts converts them itself; of
// more parts the first converts them for all. Other formats: from a buffer of converted weights.
enum class WeightAccess { in_place, by_first, in_buffer };

WeightAccess weight_access_for(Format format, int64_t parts) {
    if (format == Format::f32) return WeightAccess::in_place;
    if (format != Format::bf16 && format != Format::f16) return WeightAccess::in_buffer;
    return parts <= 2 ? WeightAccess::in_place : WeightAccess::by_first;
}

// The micro kernel for a part. Each of one or two parts prefetches lines of all panels; of three or more
// parts, each of the first kPanels prefetches lines of one panel.
MicroKernel micro_kernel_for(Format format, int64_t part, int64_t parts, int64_t count) {
    const WeightAccess access = weight_access_for(format, parts);
    const bool is_packed = access == WeightAccess::in_place || (access == WeightAccess::by_first && part == 0);
    if (is_packed && format == Format::bf16)
        return parts <= 2 ? micro_kernel_for<kPanels, Pairs, false>(count) : micro_kernel_for<1, Pairs, true>(count);
    if (is_packed && format == Format::f16)
        return parts <= 2 ? micro_kernel_for<kPanels, Halves, false>(count) : micro_kernel_for<1, Halves, true>(count);
    if (parts <= 2) return micro_kernel_for<kPanels, Floats, false>(count);
    return part < kPanels ? micro_kernel_for<1, Floats, false>(count) : micro_kernel_for<0, Floats, false>(count);
}

typedef float FloatPanel[kInputs][kWidth];

// A task: multiplies some rows with kPanels panels.
struct Task {
    const PanelCall& call;
    const PanelLayout layout;
    int64_t begin, end, panel;  // rows, and the first panel
};

// A range of inputs of a task that are decoded together.
struct InputRange {
    int64_t first, count;
};

QUIRE_INLINE void widen(const Task& task, const InputRange& range, FloatPanel* wide) {
    for (int p = 0; p < kPanels; ++p)
        decoder_of(task.call.shape.format)
            .widen({task.call.shape, task.layout.panel(task.panel + p), range.first, range.count}, wide[p][0]);
}

// Sets the addresses that a part of the rows prefetches: a single part, a fixed distance ahead; several parts together,
// the next range of inputs.
QUIRE_INLINE void plan_prefetch(const Task& task, const InputRange& range, int64_t part, int64_t parts, Weights& weights) {
    const int64_t input_bytes = task.layout.group_bytes / kGroupInputs, end = range.first + range.count;
    const bool is_last_range = end == task.call.shape.num_in;
    const int64_t next_panel = task.panel + (is_last_range ? kPanels : 0), next_first = is_last_range ? 0 : end;
    weights.prefetch_step = parts == 2 ? input_bytes / 2 : input_bytes;
    for (int p = 0; p < kPanels; ++p) {
        const int64_t panel = parts <= 2 ? p : part % kPanels;
        weights.prefetch[p] = parts == 1 ? task.layout.codes_after(task.panel + panel, range.first, kPrefetchBytes,
                                                                   kPanels)
                                      : task.layout.codes(next_panel + panel, next_first);
        if (parts == 2) weights.prefetch[p] += part * range.count * weights.prefetch_step;
    }
}

// A single part decodes as many inputs as fit in the L1 cache; several parts, equal ranges that fit in the L2 cache.
QUIRE_INLINE int64_t num_inputs_per_range(int64_t num_in, WeightAccess access, int64_t parts) {
    if (parts <= 2 && access == WeightAccess::in_place) return num_in;
    if (parts == 1) return kFewInputs;
    const int64_t num_ranges = (num_in + kInputs - 1) / kInputs, range_size = (num_in + num_ranges - 1) / num_ranges;
    return (range_size + kGroupInputs - 1) / kGroupInputs * kGroupInputs;
}

void run_task(const Task& task) {
    const PanelCall& call = task.call;
    const Format format = call.shape.format;
    const int64_t num_rows = task.end - task.begin;
    const int64_t size = rows_per_part(num_rows, kTileRows), parts = (num_rows + size - 1) / size;
    const WeightAccess access = weight_access_for(format, parts);
    const int64_t num_in = call.shape.num_in, inputs_per_range = num_inputs_per_range(num_in, access, parts);
    alignas(64) FloatPanel wide[kPanels];
    alignas(64) float sums[kRowsInL2 * kVectors * kLanes];
    __builtin_memset(sums, 0, static_cast<size_t>(num_rows * kVectors * kLanes) * sizeof(float));
    Weights weights;
    for (int64_t first = 0; first < num_in; first += inputs_per_range) {
        const InputRange range = {first, min_of(inputs_per_range, num_in - first)};
        if (access == WeightAccess::in_buffer) widen(task, range, wide);
        weights.num_inputs = range.count;
        for (int64_t part = 0; part < parts; ++part) {
            const bool in_panel = access == WeightAccess::in_place || (access == WeightAccess::by_first && part == 0);
            for (int p = 0; p < kPanels; ++p) {
                weights.converted[p] = wide[p][0];
                weights.values[p] =
                    in_panel ? task.layout.codes(task.panel + p, first) : reinterpret_cast<uint8_t*>(wide[p]);
            }
            plan_prefetch(task, range, part, parts, weights);
            const float* rows = call.rows + (task.begin + part * size) * call.row_stride + first;
            micro_kernel_for(format, part, parts, min_of(size, num_rows - part * size))(weights, rows, call.row_stride,
                                                                           sums + part * size * kVectors * kLanes);
        }
    }
    write_sums(call, task.begin, num_rows, task.panel * kWidth, sums, kVectors * kLanes);
}

int64_t num_panel_sets(const PanelCall& call) { return (call.shape.num_panels() + kPanels - 1) / kPanels; }

int64_t num_row_groups(const PanelCall& call) { return (call.num_rows + kRowsInL2 - 1) / kRowsInL2; }

}  // namespace

int64_t panel_float_tasks(const PanelCall& call) { return num_panel_sets(call) * num_row_groups(call); }

void panel_floats(const PanelCall& call, int64_t task) {
    const int64_t panel_sets = num_panel_sets(call), groups = num_row_groups(call), group = task / panel_sets;
    run_task({call, PanelLayout(call), call.num_rows * group / groups, call.num_rows * (group + 1) / groups,
              task % panel_sets * kPanels});
}

void panel_unpack(const UnpackCall& call, int64_t output) {
    const Dequantizer& decoder = decoder_of(call.shape.format);
    const uint8_t* panel = call.packed + output / kWidth * call.shape.panel_bytes();
    alignas(64) FloatPanel wide;
    for (int64_t first = 0; first < call.shape.num_in; first += kInputs) {
        const int64_t count = min_of(kInputs, call.shape.num_in - first);
        decoder.widen({call.shape, panel, first, count}, wide[0]);
        for (int64_t i = 0; i < count; ++i) call.out[first + i] = wide[i][output % kWidth];
    }
}

}  // namespace quire::QUIRE_ISA
