// One call that computes a decoder for the rows of a step, from tokens to logits. All fields are eight bytes wide,
// because the caller (backends/cpu/layers.py) defines the layout of these structures itself. They own no memory.
//
// Null pointers and numbers express the differences between model families; no family is named here:
//
//     residual    = embedding * embedding_scale
//     hidden      = norm(residual)                                              input_norm
//     residual   += norm(attention(hidden)) * added_scale                       attention_norm; or recurrent.hpp
//     hidden      = norm(residual)                                              mlp_norm
//     residual   += norm(norm(mlp(hidden)) + norm(mixture(..))) * added_scale   after_norm; see MoE for the inner norms
//     residual   += norm(project(gate(residual) * per-layer row))               per_layer
//     residual   *= scale                                                       layer.scale
#pragma once

#include "panels/panel_calls.hpp"
#include "layers/recurrent.hpp"

namespace quire {

// The packing of a weight, by dense.isa.cpp, amx.cpp (both as in WeightType), or pack.cpp.
enum Packing : int64_t { kFloat32 = 0, kAmx = 1, kPanels = 2 };

// A packed weight and its bias.
struct Linear {
    int64_t packing;
    int64_t format, arithmetic, group;  // for panels: Format, ComputeType, inputs per external scale
    const void* packed;
    const float* bias;  // [out], or null
    int64_t num_in, num_out;
};

// A mixture of experts; each row uses a few of the experts.
struct MoE {
    Linear router;
    const float* router_norm;    // norm of the residual for the router; null: the router uses the MLP's input
    const float* input_norm;     // the same for the input of the experts
    const float* dense_norm;     // norm of the dense part's output before the experts' output is added; or null
    const float* after_norm;     // norm of the experts' output; or null
    const float* expert_scales;  // [expert], or null
    const Linear* gate_up;       // [expert, 2]; all experts have the same packing
    const Linear* down;          // [expert]
    int64_t num_experts, num_used, intermediate_size;  // num_experts 0: the layer has no mixture
    int64_t softmax_over_all;    // whether weights are normalized over all experts, or only over the used experts
    int64_t is_sigmoid;          // whether weights use the sigmoid of a score, not its exponential
    const float* selection_bias;    // [expert]: added to scores for the choice of experts, not for weights; or null
    const float* shared_expert_gate;     // [hidden]: sigmoid(gate . row) scales the dense part's output; or null
    double denominator_eps, scale;   // added to the denominator of weights; factor of all weights
};

// Weights that add a per-layer embedding.
struct PerLayer {
    Linear gate, project;
    const float* after_norm;
};

struct Layer {
    const float *input_norm, *attention_norm, *mlp_norm, *after_norm;  // each or null
    const float *query_norm, *key_norm, *value_norm;                   // each or null
    const float* sinks;  // [head], or null
    Linear qkv[4], out, gate_up[2], down;  // their outputs are adjacent; unused ones: zeros
    MoE mixture;
    PerLayer per_layer;
    Recurrent recurrent;  // instead of attention, unless its kind is none
    int64_t window;  // -1: none
    int64_t num_kv_heads, head_size, intermediate_size;
    int64_t has_kv;        // whether the layer writes keys and values; else it uses the store of an earlier layer
    int64_t has_values;    // whether values have a projection; else values are the keys before their norm
    int64_t has_gate;      // whether values are followed by gates: attention output *= sigmoid(gates)
    int64_t query_span, key_span;  // values normalized together, as in HeadNorm
    int64_t rope;          // index into the call's ropes
    int64_t number;        // index of the layer in the model
    double scale;
};

struct LayerStore {
    void* keys;
    void* values;
    int64_t key_block_stride, value_block_stride;
};

// The RoPE frequencies of a kind of layers.
struct RopeRule {
    const float* frequencies;  // [head size / 2]
    double scaling;            // factor of cosines and sines
    int64_t head_size;
    int64_t first;  // offset of these cosines and sines in a row of ForwardCall::cos and sin
};

struct ForwardCall {
    Linear embedding, head;  // may be the same weight
    Linear per_layer_embedding, per_layer_projection;  // zeros if unused
    const float* per_layer_norm;  // [per_layer_size]
    int64_t per_layer_size;
    double per_layer_scale, projection_scale, per_layer_sum_scale;
    const Layer* layers;
    const LayerStore* stores;  // one per layer
    float* states;             // [slot, slot_size]: states of recurrent layers
    int64_t slot_size;
    const RopeRule* ropes;
    int64_t num_layers, num_all_layers, num_ropes;  // layers of this call; layers of the model
    const float* norm;  // weight of the last norm
    double eps, scale, softcap;
    double embedding_scale, added_scale, logit_scale, logit_cap;
    double query_beta, query_origin;  // queries *= 1 + beta log(1 + floor(position / origin)); beta 0: unused
    int64_t num_heads, hidden_size, gate;
    int64_t angles_size;                 // cosines per row, for all ropes
    int64_t max_head_size, max_group_size;  // maxima over all layers
    int64_t kv_type, block_size;
    // Inputs of each step:
    const int64_t* tokens;  // [row]
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* slots;
    const int32_t* tables;
    const TileRow* members;
    const QueryTile* tiles;
    const int64_t* wanted;  // wanted rows: rows whose logits are computed; the first `num_sampled` get an argmax token
    const int64_t* needed;  // needed rows, ascending: rows whose last hidden states are computed; wanted rows and others
    const int64_t* run_rows;   // [run + 1]: first rows of runs; a run is the rows of one sequence
    const int64_t* run_slots;  // [run]: state slot of the sequence
    int64_t num_tiles, num_rows, num_wanted, num_needed, num_sampled, num_threads, num_runs;
    // Outputs:
    float* hidden;       // [row, hidden]: last hidden states of needed rows
    float* logits;       // [wanted, vocabulary]
    int64_t* argmax_tokens;  // [sampled]; see ArgmaxCall
    uint8_t* are_logits_finite;   // [sampled]: whether all logits of the row are finite
    uint8_t* is_finite;  // [row]: whether the last hidden state is finite, or the attention output of unneeded rows
    // Intermediate buffers:
    float* residual;      // [row, hidden]
    float* added;         // [row, hidden]
    float* queries;       // [row, heads x head size]
    float* answers;       // shape of queries
    float* cos;           // [row, angles_size]
    float* sin;
    float* query_scales;  // [row]
    float* per_layer;     // [row, layer, per_layer_size]
    float* picked;        // [wanted, hidden]
    float* gates;         // shape of queries: gates of the attention output
    float* qkv;           // [row of a chunk, queries, keys and values], or the input projection of a recurrent layer
    float* mixed;         // [row of a chunk, channel]
    float* rates;         // [row of a chunk, 2, head]
    float* gate_up;       // [row of a chunk, 2 x intermediate]
    float* gated;         // [row of a chunk, intermediate]
    int64_t chunk_rows;   // rows per chunk: products run chunk by chunk, so that intermediates stay in the cache
    double* seconds;      // [Part], or null: the durations of parts are added here
};

enum Part {
    kQkv, kOut, kGateUp, kDown, kAttention, kRopeWrite, kNorm, kGated, kEmbed, kHead, kArgmax, kRouter, kExperts, kPerLayer,
    kMix, kScan
};

// Throws std::out_of_range, before any computation, if a token or row index is invalid.
void compute_step(const ForwardCall& call);

// Sets the counter that is incremented after each layer of a step; it may be in shared memory. Null: no counter.
void set_layer_counter(uint64_t* counter);

}  // namespace quire
