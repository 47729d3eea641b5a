// Recurrent layers, with a state instead of keys and values. The state of a sequence has a fixed size and is updated
// token by token; a state slot contains the states of all recurrent layers.
//
//     in         output of the input projection: gates, time steps, and the channels to convolve
//     mixed      causal convolution of each channel over the last few tokens (taps)
//     scanned    state = decay x state + key (x) change;  out = query . state
//     out        normalized and gated, the input of the output projection
//
// Three kinds with similar computations:
//
//     delta         change = rate x (value - key . (decay x state))    gated delta nets
//     space         change = rate x value                              Mamba-2: keys are B, queries are C, rate is dt
//     convolution   only the convolution, gated before and after       short convolutions
//
// The guarantee of kernels.hpp applies to tokens too: the update of a token reads only its row and the state before it,
// in a fixed order. So the bits do not depend on the division of a sequence into steps.
#pragma once

#include <cstdint>

namespace quire {

enum class RecurrentKind : int64_t { none = 0, delta = 1, state_space = 2, convolution = 3 };

// A state is stored in blocks of columns: [head, columns / kColumns, key size, kColumns]. The last block is padded.
constexpr int64_t kColumns = 32;
constexpr int64_t kMaxTaps = 8, kMaxKeySize = 512;

// Every field is eight bytes wide, as in forward.hpp.
struct Recurrent {
    RecurrentKind kind;
    const float* taps;       // [tap, channel], the oldest first
    const float* tap_bias;   // [channel], or null
    const float* log_decay;  // [head]: negative
    const float* step_bias;  // [head]
    const float* skip;       // [head], factors of values that are added to the output; or null
    const float* norm;       // [out_size] if gated before the norm, else [norm_span]
    int64_t num_taps, num_channels;
    int64_t num_key_heads, num_heads, key_size, value_size;
    int64_t kv_heads_strided;  // true: value heads h, h + key heads, .. share key head h; false: consecutive heads
    // Offsets in a row of `in`; the last three in a row of `mixed`.
    int64_t mixed_offset, gate_offset, rate_offset, dt_offset;
    int64_t query_offset, key_offset, value_offset;
    int64_t in_size, out_size;
    int64_t norm_span, is_gated_first;
    int64_t history_offset, state_offset;  // offsets in a slot: earlier inputs [tap - 1, channel], and the state
    double min_dt, max_dt;
};

// One layer and a chunk of rows. A run is the rows of one sequence in this step; a chunk may contain a part of it.
struct RecurrentCall {
    const Recurrent* layer;
    const float* in;  // [row of the chunk, in_size]
    float* mixed;     // [row of the chunk, channel]
    float* rates;     // [row of the chunk, 2, head]: decays, rates
    float* out;       // [row of the chunk, out_size]
    float* slots;     // [slot, slot_size]
    int64_t slot_size;
    const int64_t* run_rows;   // [run + 1]: first rows of runs, counted within the step
    const int64_t* run_slots;  // [run]
    int64_t first_row, num_rows;  // the chunk
    float eps;
};

inline int64_t num_state_blocks(const Recurrent& layer) { return (layer.value_size + kColumns - 1) / kColumns; }

}  // namespace quire
