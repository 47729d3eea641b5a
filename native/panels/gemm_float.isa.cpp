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
constexpr int64_t kAheadBytes = 2048;  // prefetch distance in each panel

// The weights that are multiplied with a part of the rows.
struct Weights {
    const uint8_t* numbers[kPanels];  // of the type `Kind` of the micro kernel
    int64_t num_inputs;
    const uint8_t* ahead[kPanels];  // addresses to prefetch meanwhile
    int64_t ahead_step;             // bytes per input
    float* wide[kPanels];           // [input][16]: buffer for weights that the first of many parts has converted
};

// Weight types. at() loads vector v of kVectors at input i.
struct Floats {
    static QUIRE_INLINE F at(const Weights& weights, int64_t i, int v) {
        const uint8_t* from = weights.numbers[v / kVectorsPerPanel] + (i * kWidth + v % kVectorsPerPanel * kLanes) * 4;
        return load<kLanes>(reinterpret_cast<const float*>(from));
    }
};

struct Halves {
    static QUIRE_INLINE F at(const Weights& weights, int64_t i, int v) {
        return load_halves<kLanes>(weights.numbers[v / kVectorsPerPanel] + (i * kWidth + v % kVectorsPerPanel * kLanes) * 2);
    }
};

struct Pairs {
    static QUIRE_INLINE F at(const Weights& weights, int64_t i, int v) {
        Lanes<kLanes>::U pair;
        __builtin_memcpy(&pair, weights.numbers[v / kVectorsPerPanel] + (i / 2 * kWidth + v % kVectorsPerPanel * kLanes) * 4, sizeof pair);
        return (F)(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    }
};

// Adds the products of one input for R rows. If `keeps`, also stores the converted weights in `wide`.
template <int R, typename Kind, bool keeps>
QUIRE_INLINE void add_input(const Weights& weights, int64_t i, const float* rows, int64_t stride,
                            F (&sum)[R][kVectors]) {
    F weight[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        weight[v] = held(Kind::at(weights, i, v));
        if constexpr (keeps) store(weights.wide[v / kVectorsPerPanel] + i * kWidth + v % kVectorsPerPanel * kLanes, weight[v]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        const F number = splat<kLanes>(rows[r * stride + i]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = held(fused(number, weight[v], sum[r][v]));
    }
}

// Multiplies R rows. Prefetches one cache line of each of the first N panels per two inputs.
template <int R, int N, typename Kind, bool keeps>
void micro_kernel(const Weights& weights, const float* rows, int64_t stride, float* sums) {
    F sum[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = load<kLanes>(sums + (r * kVectors + v) * kLanes);
    int64_t i = 0;
    for (; i + 2 <= weights.num_inputs; i += 2) {
        add_input<R, Kind, keeps>(weights, i, rows, stride, sum);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
            __builtin_prefetch(weights.ahead[n] + i * weights.ahead_step);
            if (weights.ahead_step > kCacheLineBytes / 2) __builtin_prefetch(weights.ahead[n] + (i + 1) * weights.ahead_step);
        }
        add_input<R, Kind, keeps>(weights, i + 1, rows, stride, sum);
    }
    if (i < weights.num_inputs) add_input<R, Kind, keeps>(weights, i, rows, stride, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

typedef void (*MicroKernel)(const Weights&, const float*, int64_t, float*);

template <int N, typename Kind, bool keeps>
MicroKernel micro_kernel_for(int64_t count) {
    switch (count) {
        case 1: return micro_kernel<1, N, Kind, keeps>;
        case 2: return micro_kernel<2, N, Kind, keeps>;
    }
    if constexpr (kTileRows > 2) switch (count) {
        case 3: return micro_kernel<3, N, Kind, keeps>;
        case 4: return micro_kernel<4, N, Kind, keeps>;
        case 5: return micro_kernel<5, N, Kind, keeps>;
        case 6: return micro_kernel<6, N, Kind, keeps>;
    }
    if constexpr (kTileRows > 6) switch (count) {
        case 7: return micro_kernel<7, N, Kind, keeps>;
        case 8: return micro_kernel<8, N, Kind, keeps>;
        case 9: return micro_kernel<9, N, Kind, keeps>;
    }
    return nullptr;
}

// How the parts of a task read weights. Float32: in place. 16 bits: converted in registers by each part if there are at
// most two, else by the first part, which keeps them for the other parts. Other formats: converted beforehand.
enum class WeightAccess { in_place, kept, widened };

WeightAccess reading_of(Format format, int64_t parts) {
    if (format == Format::f32) return WeightAccess::in_place;
    if (format != Format::bf16 && format != Format::f16) return WeightAccess::widened;
    return parts <= 2 ? WeightAccess::in_place : WeightAccess::kept;
}

// The micro kernel for part `at` of `parts`. Each of one or two parts prefetches lines of all panels; of three or more
// parts, each of the first kPanels prefetches lines of one panel.
MicroKernel micro_kernel_for(Format format, int64_t at, int64_t parts, int64_t count) {
    const WeightAccess reading = reading_of(format, parts);
    const bool is_own = reading == WeightAccess::in_place || (reading == WeightAccess::kept && at == 0);
    if (is_own && format == Format::bf16)
        return parts <= 2 ? micro_kernel_for<kPanels, Pairs, false>(count) : micro_kernel_for<1, Pairs, true>(count);
    if (is_own && format == Format::f16)
        return parts <= 2 ? micro_kernel_for<kPanels, Halves, false>(count) : micro_kernel_for<1, Halves, true>(count);
    if (parts <= 2) return micro_kernel_for<kPanels, Floats, false>(count);
    return at < kPanels ? micro_kernel_for<1, Floats, false>(count) : micro_kernel_for<0, Floats, false>(count);
}

typedef float Wide[kInputs][kWidth];

// A task: multiplies some rows with kPanels panels.
struct Task {
    const PanelCall& call;
    const PanelLayout places;
    int64_t begin, end, panel;  // rows, and the first panel
};

// A range of inputs of a task that are decoded together.
struct InputRange {
    int64_t first, count;
};

QUIRE_INLINE void widen(const Task& task, const InputRange& stretch, Wide* wide) {
    for (int p = 0; p < kPanels; ++p)
        decoder_of(task.call.shape.format)
            .widen({task.call.shape, task.places.panel(task.panel + p), stretch.first, stretch.count}, wide[p][0]);
}

// Sets the addresses that a part of the rows prefetches. A single part prefetches a fixed distance ahead. Of several
// parts only the first would wait for memory, so together they prefetch the next range of inputs.
QUIRE_INLINE void plan_prefetch(const Task& task, const InputRange& stretch, int64_t at, int64_t parts, Weights& weights) {
    const int64_t input_bytes = task.places.group_bytes / kGroupInputs, end = stretch.first + stretch.count;
    const bool is_last = end == task.call.shape.num_in;
    const int64_t next_panel = task.panel + (is_last ? kPanels : 0), next_first = is_last ? 0 : end;
    weights.ahead_step = parts == 2 ? input_bytes / 2 : input_bytes;
    for (int p = 0; p < kPanels; ++p) {
        const int64_t panel = parts <= 2 ? p : at % kPanels;
        weights.ahead[p] = parts == 1 ? task.places.ahead(task.panel + panel, stretch.first, kAheadBytes, kPanels)
                                      : task.places.codes(next_panel + panel, next_first);
        if (parts == 2) weights.ahead[p] += at * stretch.count * weights.ahead_step;
    }
}

// The number of inputs decoded at a time. One part: as many as fit in the L1 cache. Several parts: equal pieces that
// fit in the L2 cache, because sums are stored to memory between pieces.
QUIRE_INLINE int64_t inputs_at_once(int64_t num_in, WeightAccess reading, int64_t parts) {
    if (parts <= 2 && reading == WeightAccess::in_place) return num_in;
    if (parts == 1) return kFewInputs;
    const int64_t pieces = (num_in + kInputs - 1) / kInputs, each = (num_in + pieces - 1) / pieces;
    return (each + kGroupInputs - 1) / kGroupInputs * kGroupInputs;
}

void run_task(const Task& task) {
    const PanelCall& call = task.call;
    const Format format = call.shape.format;
    const int64_t num_rows = task.end - task.begin;
    const int64_t part = rows_of_part(num_rows, kTileRows), parts = (num_rows + part - 1) / part;
    const WeightAccess reading = reading_of(format, parts);
    const int64_t num_in = call.shape.num_in, at_once = inputs_at_once(num_in, reading, parts);
    alignas(64) Wide wide[kPanels];
    alignas(64) float sums[kRowsInL2 * kVectors * kLanes];
    __builtin_memset(sums, 0, static_cast<size_t>(num_rows * kVectors * kLanes) * sizeof(float));
    Weights weights;
    for (int64_t first = 0; first < num_in; first += at_once) {
        const InputRange stretch = {first, least(at_once, num_in - first)};
        if (reading == WeightAccess::widened) widen(task, stretch, wide);
        weights.num_inputs = stretch.count;
        for (int64_t at = 0; at < parts; ++at) {
            const bool is_own = reading == WeightAccess::in_place || (reading == WeightAccess::kept && at == 0);
            for (int p = 0; p < kPanels; ++p) {
                weights.wide[p] = wide[p][0];
                weights.numbers[p] =
                    is_own ? task.places.codes(task.panel + p, first) : reinterpret_cast<uint8_t*>(wide[p]);
            }
            plan_prefetch(task, stretch, at, parts, weights);
            const float* rows = call.rows + (task.begin + at * part) * call.row_stride + first;
            micro_kernel_for(format, at, parts, least(part, num_rows - at * part))(weights, rows, call.row_stride,
                                                                           sums + at * part * kVectors * kLanes);
        }
    }
    put_sums(call, task.begin, num_rows, task.panel * kWidth, sums, kVectors * kLanes);
}

int64_t num_runs(const PanelCall& call) { return (call.shape.num_panels() + kPanels - 1) / kPanels; }

int64_t num_row_groups(const PanelCall& call) { return (call.num_rows + kRowsInL2 - 1) / kRowsInL2; }

}  // namespace

int64_t panel_float_tasks(const PanelCall& call) { return num_runs(call) * num_row_groups(call); }

void panel_floats(const PanelCall& call, int64_t task) {
    const int64_t runs = num_runs(call), groups = num_row_groups(call), group = task / runs;
    run_task({call, PanelLayout(call), call.num_rows * group / groups, call.num_rows * (group + 1) / groups,
              task % runs * kPanels});
}

void panel_unpack(const UnpackCall& call, int64_t output) {
    const Dequantizer& decoder = decoder_of(call.shape.format);
    const uint8_t* panel = call.packed + output / kWidth * call.shape.panel_bytes();
    alignas(64) Wide wide;
    for (int64_t first = 0; first < call.shape.num_in; first += kInputs) {
        const int64_t count = least(kInputs, call.shape.num_in - first);
        decoder.widen({call.shape, panel, first, count}, wide[0]);
        for (int64_t i = 0; i < count; ++i) call.out[first + i] = wide[i][output % kWidth];
    }
}

}  // namespace quire::QUIRE_ISA
