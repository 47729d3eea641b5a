// See recurrent.hpp. The convolution runs per channel and the scan per column. Neither adds values across the lanes of
// a vector, so the results do not depend on the vector width.
#include "layers/recurrent.hpp"

#include "common/row_math.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

constexpr int kVectors = kColumns / kLanes;

// The rows [first, end) of a run that are in the chunk, counted within the chunk.
struct RunRows {
    int64_t first, end;
};

QUIRE_INLINE RunRows rows_of(const RecurrentCall& call, int64_t run) {
    const int64_t first = call.run_rows[run] - call.first_row, end = call.run_rows[run + 1] - call.first_row;
    return {first < 0 ? 0 : first, end < call.num_rows ? end : call.num_rows};
}

QUIRE_INLINE F load_n(const float* from, int64_t count) {
    return count >= kLanes ? load<kLanes>(from) : load_part<kLanes>(from, count);
}

QUIRE_INLINE void store_n(float* to, F v, int64_t count) {
    if (count >= kLanes)
        store(to, v);
    else
        store_part(to, v, count);
}

QUIRE_INLINE F silu(F x) { return x * sigmoid(x); }

QUIRE_INLINE double soft_plus(double x) { return x > 20.0 ? x : __builtin_log1p(__builtin_exp(x)); }

// The causal convolution of a vector of channels over the rows of a run: the sum of taps x inputs, oldest token first.
template <bool IsShort>
QUIRE_INLINE void convolve_channels(const RecurrentCall& call, const RunRows& rows, float* history, int64_t channel, int64_t count) {
    const Recurrent& layer = *call.layer;
    const int64_t num_earlier = layer.num_taps - 1, channels = layer.num_channels;
    F earlier[kMaxTaps] = {}, taps[kMaxTaps] = {};
    for (int64_t tap = 0; tap < layer.num_taps; ++tap) taps[tap] = load_n(layer.taps + tap * channels + channel, count);
    for (int64_t tap = 0; tap < num_earlier; ++tap) earlier[tap] = load_n(history + tap * channels + channel, count);
    const F bias = layer.tap_bias == nullptr ? F{} : load_n(layer.tap_bias + channel, count);
    for (int64_t row = rows.first; row < rows.end; ++row) {
        const float* in = call.in + row * layer.in_size + channel;
        F current = load_n(in + layer.mixed_offset, count);
        if constexpr (IsShort) current = current * load_n(in + layer.gate_offset, count);
        F sum = bias;
        for (int64_t tap = 0; tap < num_earlier; ++tap) sum = fma_of(taps[tap], earlier[tap], sum);
        sum = fma_of(taps[num_earlier], current, sum);
        if constexpr (IsShort)
            store_n(call.out + row * layer.out_size + channel, sum * load_n(in + layer.rate_offset, count), count);
        else
            store_n(call.mixed + row * channels + channel, silu(sum), count);
        for (int64_t tap = 0; tap + 1 < num_earlier; ++tap) earlier[tap] = earlier[tap + 1];
        if (num_earlier > 0) earlier[num_earlier - 1] = current;
    }
    for (int64_t tap = 0; tap < num_earlier; ++tap) store_n(history + tap * channels + channel, earlier[tap], count);
}

// Scales a vector to the given length.
QUIRE_INLINE void l2_normalize(float* numbers, int64_t size, float length) {
    const float factor = length / __builtin_sqrtf(sum_of_squares(numbers, size) + 1e-6f);
    for (int64_t i = 0; i < size; ++i) numbers[i] *= factor;
}

// Scans the rows of a run for one block of columns. Even and odd rows of the state are summed separately, then added.
template <bool IsDelta>
QUIRE_INLINE void scan_block(const RecurrentCall& call, const RunRows& rows, int64_t head, int64_t block, float* state) {
    const Recurrent& layer = *call.layer;
    const int64_t size = layer.key_size, first = block * kColumns, channels = layer.num_channels;
    const int64_t count = layer.value_size - first < kColumns ? layer.value_size - first : kColumns;
    const int64_t key_head =
        layer.kv_heads_strided ? head % layer.num_key_heads : head / (layer.num_heads / layer.num_key_heads);
    for (int64_t row = rows.first; row < rows.end; ++row) {
        const float* mixed = call.mixed + row * channels;
        const float* key = mixed + layer.key_offset + key_head * size;
        const float* query = mixed + layer.query_offset + key_head * size;
        const float* value = mixed + layer.value_offset + head * layer.value_size + first;
        const float decay = call.rates[row * 2 * layer.num_heads + head];
        const float rate = call.rates[(row * 2 + 1) * layer.num_heads + head];
        F change[kVectors], out[2][kVectors] = {};
        for (int v = 0; v < kVectors; ++v) {
            const int64_t rest = count - v * kLanes;
            change[v] = rest <= 0 ? F{} : load_n(value + v * kLanes, rest);
        }
        if constexpr (IsDelta) {
            F dots[2][kVectors] = {};
            for (int64_t i = 0; i < size; i += 2)
#pragma GCC unroll 2
                for (int n = 0; n < 2; ++n) {
                    const F k = splat<kLanes>(key[i + n]);
#pragma GCC unroll 8
                    for (int v = 0; v < kVectors; ++v)
                        dots[n][v] = fma_of(load<kLanes>(state + (i + n) * kColumns + v * kLanes), k, dots[n][v]);
                }
            for (int v = 0; v < kVectors; ++v) change[v] = change[v] - decay * (dots[0][v] + dots[1][v]);
        }
        for (int v = 0; v < kVectors; ++v) change[v] = change[v] * rate;
        for (int64_t i = 0; i < size; i += 2)
#pragma GCC unroll 2
            for (int n = 0; n < 2; ++n) {
                const F k = splat<kLanes>(key[i + n]), q = splat<kLanes>(query[i + n]);
#pragma GCC unroll 8
                for (int v = 0; v < kVectors; ++v) {
                    float* cell = state + (i + n) * kColumns + v * kLanes;
                    const F updated = fma_of(k, change[v], load<kLanes>(cell) * decay);
                    store(cell, updated);
                    out[n][v] = fma_of(updated, q, out[n][v]);
                }
            }
        float* to = call.out + row * layer.out_size + head * layer.value_size + first;
        for (int v = 0; v < kVectors && v * kLanes < count; ++v) {
            F sum = out[0][v] + out[1][v];
            const int64_t rest = count - v * kLanes;
            if (layer.skip != nullptr) sum = fma_of(load_n(value + v * kLanes, rest), splat<kLanes>(layer.skip[head]), sum);
            store_n(to + v * kLanes, sum, rest);
        }
    }
}

}  // namespace

void conv1d(const RecurrentCall& call, int64_t run, int64_t first, int64_t end) {
    const RunRows rows = rows_of(call, run);
    float* history = call.slots + call.run_slots[run] * call.slot_size + call.layer->history_offset;
    for (int64_t channel = first; channel < end; channel += kLanes) {
        if (call.layer->kind == RecurrentKind::convolution)
            convolve_channels<true>(call, rows, history, channel, end - channel);
        else
            convolve_channels<false>(call, rows, history, channel, end - channel);
    }
}

void compute_decays(const RecurrentCall& call, int64_t row) {
    const Recurrent& layer = *call.layer;
    const float* in = call.in + row * layer.in_size;
    float* decays = call.rates + row * 2 * layer.num_heads;
    const bool is_delta = layer.kind == RecurrentKind::delta;
    if (is_delta) {
        const float length = 1.0f / __builtin_sqrtf(static_cast<float>(layer.key_size));
        float* mixed = call.mixed + row * layer.num_channels;
        for (int64_t head = 0; head < layer.num_key_heads; ++head) {
            l2_normalize(mixed + layer.query_offset + head * layer.key_size, layer.key_size, length);
            l2_normalize(mixed + layer.key_offset + head * layer.key_size, layer.key_size, 1.0f);
        }
    }
    for (int64_t head = 0; head < layer.num_heads; ++head) {
        double step = soft_plus(static_cast<double>(in[layer.dt_offset + head] + layer.step_bias[head]));
        step = step < layer.min_dt ? layer.min_dt : step > layer.max_dt ? layer.max_dt : step;
        decays[head] = static_cast<float>(__builtin_exp(step * static_cast<double>(layer.log_decay[head])));
        const double rate = is_delta ? 1.0 / (1.0 + __builtin_exp(-static_cast<double>(in[layer.rate_offset + head]))) : step;
        decays[layer.num_heads + head] = static_cast<float>(rate);
    }
}

void scan_run(const RecurrentCall& call, int64_t run, int64_t head, int64_t block) {
    const Recurrent& layer = *call.layer;
    const int64_t offset = (head * num_state_blocks(layer) + block) * layer.key_size * kColumns;
    float* state = call.slots + call.run_slots[run] * call.slot_size + layer.state_offset + offset;
    if (layer.kind == RecurrentKind::delta)
        scan_block<true>(call, rows_of(call, run), head, block, state);
    else
        scan_block<false>(call, rows_of(call, run), head, block, state);
}

void norm_and_gate_row(const RecurrentCall& call, int64_t row) {
    const Recurrent& layer = *call.layer;
    float* out = call.out + row * layer.out_size;
    const float* gate = call.in + row * layer.in_size + layer.gate_offset;
    for (int64_t first = 0; first < layer.out_size; first += layer.norm_span) {
        float* part = out + first;
        if (layer.is_gated_first)
            for (int64_t i = 0; i < layer.norm_span; i += kLanes) {
                const int64_t rest = layer.norm_span - i;
                store_n(part + i, load_n(part + i, rest) * silu(load_n(gate + first + i, rest)), rest);
            }
        const float factor = norm_factor(part, layer.norm_span, call.eps);
        const float* weight = layer.norm + (layer.is_gated_first ? first : 0);
        for (int64_t i = 0; i < layer.norm_span; i += kLanes) {
            const int64_t rest = layer.norm_span - i;
            F v = load_n(weight + i, rest) * (load_n(part + i, rest) * factor);
            if (!layer.is_gated_first) v = v * silu(load_n(gate + first + i, rest));
            store_n(part + i, v, rest);
        }
    }
}

void apply_output_gate(const float* gates, float* outputs, int64_t size) {
    for (int64_t i = 0; i < size; i += kLanes)
        store_n(outputs + i, load_n(outputs + i, size - i) * sigmoid(load_n(gates + i, size - i)), size - i);
}

}  // namespace quire::QUIRE_ISA
