// Layers that keep a state instead of keys and values. What a layer knows of a sequence is one state of fixed size, made
// token by token; it lies in a slot, with those of all other recurrent layers.
//
//     in         what one product makes of a row: gates, steps, and what is convolved
//     mixed      each channel of it, mixed with its values of the last few tokens
//     scanned    state = decay x state + key (x) change;  out = query . state
//     out        normed and gated, for the product behind
//
// Three kinds, which differ in numbers more than in arithmetic:
//
//     delta         change = rate x (value - key . state), decayed first     gated delta nets
//     space         change = rate x value                                    Mamba-2: keys are B, queries C, rate the step
//     convolution   no more than the mixing, gated before and behind         short convolutions
//
// The promise of kernels.hpp holds for tokens too: a token's update reads its own row and the state before it, in a fixed
// order. So the bits do not depend on how a sequence was cut into steps.
#pragma once

#include <cstdint>

namespace quire {

enum class RecurrentKind : int64_t { none = 0, delta = 1, space = 2, convolution = 3 };

// Columns of a state that lie together: [head, columns / kColumns, key size, kColumns]. A value's last columns are padded.
constexpr int64_t kColumns = 32;
constexpr int64_t kMostTaps = 8, kMostKeySize = 512;

// Every field is eight bytes wide, as in forward.hpp.
struct Recurrent {
    RecurrentKind kind;
    const float* taps;       // [tap, channel], the oldest first
    const float* tap_bias;   // [channel], or null
    const float* log_decay;  // [head]: below zero
    const float* step_bias;  // [head]
    const float* skip;       // [head], what values add to the output by themselves; or null
    const float* norm;       // [out_size] if gated first, else [norm_span]
    int64_t num_taps, num_channels;
    int64_t num_key_heads, num_heads, key_size, value_size;
    int64_t kv_heads_strided;  // value heads h, h + key heads, .. share key head h; else neighbours do
    // Where things begin: in a row of `in`, and the last three in a row of what is mixed.
    int64_t mixed_at, gate_offset, rate_at, dt_offset;
    int64_t query_at, key_at, value_at;
    int64_t in_size, out_size;
    int64_t norm_span, is_gated_first;
    int64_t history_at, state_at;  // in a slot: [tap - 1, channel], and the state
    double min_dt, most_step;
};

// One layer and a chunk of rows. A run is a sequence's rows of this step, one behind the other; of those the chunk has
// all or some.
struct RecurrentCall {
    const Recurrent* layer;
    const float* in;  // [row of the chunk, in_size]
    float* mixed;     // [row of the chunk, channel]
    float* rates;     // [row of the chunk, 2, head]: decays, rates
    float* out;       // [row of the chunk, out_size]
    float* slots;     // [slot, slot_size]
    int64_t slot_size;
    const int64_t* run_rows;   // [run + 1], of the step
    const int64_t* run_slots;  // [run]
    int64_t first_row, num_rows;  // the chunk
    float eps;
};

inline int64_t num_state_blocks(const Recurrent& layer) { return (layer.value_size + kColumns - 1) / kColumns; }

}  // namespace quire
