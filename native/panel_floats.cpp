// Float arithmetic: out = rows x weight^T + bias with the weights that a format stands for, in float32. Every format
// has the bits of float32 weights of the same values.
#include "panel_task.hpp"
#include "panels_decode.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;

constexpr int kParts = kWidth / kLanes;  // vectors of a panel
constexpr int kPanels = kLanes == 16 ? 3 : 1;
constexpr int kVectors = kPanels * kParts;
constexpr int kMostRows = kRegisters > 16 ? (kLanes == 16 ? 9 : 6) : (kLanes == 8 ? 6 : 2);
constexpr int64_t kGroupRows = 32 * kMostRows;
constexpr int64_t kInputs = 64;         // decoded at a time: 12 KiB
constexpr int64_t kAheadBytes = 2048;  // of each panel

typedef float Wide[kPanels][kInputs][kWidth];

// What a part of the rows passes over.
struct Weights {
    const Wide* wide;
    int64_t num_inputs;
    const uint8_t* ahead[kPanels];  // asked for on the way
    int64_t ahead_step;             // bytes for each input
};

template <int R, bool asks>
void lead(const Weights& weights, const float* rows, int64_t stride, float* sums) {
    F sum[R][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sum[r][v] = load<kLanes>(sums + (r * kVectors + v) * kLanes);
    const float* wide = (*weights.wide)[0][0];
    for (int64_t i = 0; i < weights.num_inputs; ++i) {
        F weight[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v)
            weight[v] = held(load<kLanes>(wide + (v / kParts * kInputs + i) * kWidth + v % kParts * kLanes));
        if constexpr (asks)
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) __builtin_prefetch(weights.ahead[p] + i * weights.ahead_step);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F number = splat<kLanes>(rows[r * stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sum[r][v] = fused(number, weight[v], sum[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(sums + (r * kVectors + v) * kLanes, sum[r][v]);
}

template <bool asks>
void lead_some(int64_t count, const Weights& weights, const float* rows, int64_t stride, float* sums) {
    switch (count) {
        case 1: return lead<1, asks>(weights, rows, stride, sums);
        case 2: return lead<2, asks>(weights, rows, stride, sums);
    }
    if constexpr (kMostRows > 2) switch (count) {
        case 3: return lead<3, asks>(weights, rows, stride, sums);
        case 4: return lead<4, asks>(weights, rows, stride, sums);
        case 5: return lead<5, asks>(weights, rows, stride, sums);
        case 6: return lead<6, asks>(weights, rows, stride, sums);
    }
    if constexpr (kMostRows > 6) switch (count) {
        case 7: return lead<7, asks>(weights, rows, stride, sums);
        case 8: return lead<8, asks>(weights, rows, stride, sums);
        case 9: return lead<9, asks>(weights, rows, stride, sums);
    }
}

// Rows [begin, end) through kPanels panels.
void run_task(const PanelCall& call, int64_t begin, int64_t end, int64_t panel) {
    const PanelShape& shape = call.shape;
    const Decoder& decoder = decoder_of(shape.format);
    const int64_t part = rows_of_part(end - begin, kMostRows), panels = least(kPanels, shape.num_panels() - panel);
    alignas(64) Wide wide;
    alignas(64) float sums[kGroupRows * kVectors * kLanes];
    __builtin_memset(sums, 0, static_cast<size_t>((end - begin) * kVectors * kLanes) * sizeof(float));
    if (panels < kPanels) __builtin_memset(wide, 0, sizeof wide);
    Weights weights = {&wide, 0, {}, shape.group_bytes() / kGroup};
    for (int64_t first = 0; first < shape.num_in; first += kInputs) {
        weights.num_inputs = least(kInputs, shape.num_in - first);
        for (int64_t p = 0; p < kPanels; ++p) {
            const uint8_t* at = call.packed + (panel + least(p, panels - 1)) * shape.panel_bytes();
            weights.ahead[p] = at + shape.codes_at() + first * weights.ahead_step + kAheadBytes;
            if (p < panels) decoder.widen({shape, at, first, weights.num_inputs}, wide[p][0]);
        }
        for (int64_t row = begin; row < end; row += part) {
            const float* rows = call.rows + row * call.row_stride + first;
            float* to = sums + (row - begin) * kVectors * kLanes;
            const int64_t count = least(part, end - row);
            if (row == begin)
                lead_some<true>(count, weights, rows, call.row_stride, to);
            else
                lead_some<false>(count, weights, rows, call.row_stride, to);
        }
    }
    put_sums(call, begin, end - begin, panel * kWidth, sums, kVectors * kLanes);
}

}  // namespace

void panel_floats(const PanelCall& call) {
    const int64_t runs = (call.shape.num_panels() + kPanels - 1) / kPanels;
    const int64_t groups = (call.num_rows + kGroupRows - 1) / kGroupRows;
    const bool is_large = call.num_rows * call.shape.num_in * call.shape.num_out >= kWorthThreads;
    const int num_threads = is_large ? call.num_threads : 1;
    Shares shares(runs * groups, num_threads);
#pragma omp parallel num_threads(num_threads) if (is_large)
    for (int64_t task; shares.take(omp_get_thread_num(), task);) {
        const int64_t group = task / runs;
        run_task(call, call.num_rows * group / groups, call.num_rows * (group + 1) / groups, task % runs * kPanels);
    }
}

void panel_unpack(const UnpackCall& call) {
    const Decoder& decoder = decoder_of(call.shape.format);
    const bool is_large = call.num_outputs * call.shape.num_in * kWidth >= kWorthThreads;
#pragma omp parallel for schedule(static) num_threads(call.num_threads) if (is_large)
    for (int64_t at = 0; at < call.num_outputs; ++at) {
        const int64_t output = call.outputs[at];
        const uint8_t* panel = call.packed + output / kWidth * call.shape.panel_bytes();
        alignas(64) float wide[kInputs][kWidth];
        for (int64_t first = 0; first < call.shape.num_in; first += kInputs) {
            const int64_t count = least(kInputs, call.shape.num_in - first);
            decoder.widen({call.shape, panel, first, count}, wide[0]);
            for (int64_t i = 0; i < count; ++i) call.out[at * call.out_stride + first + i] = wide[i][output % kWidth];
        }
    }
}

}  // namespace quire::QUIRE_ISA
