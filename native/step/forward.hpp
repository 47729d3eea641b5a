// A decoder over one step's rows, from tokens to logits, behind one call. Every field is eight bytes wide, because the
// caller (backends/cpu/layers.py) lays these structures out by itself. They own nothing.
//
// What families of models have or have not is a null or a number here, never a name:
//
//     residual    = embedding * embedding_scale
//     hidden      = norm(residual)                                              input_norm
//     residual   += norm(attention(hidden)) * added_scale                       attention_norm; or recurrent.hpp
//     hidden      = norm(residual)                                              mlp_norm
//     residual   += norm(norm(mlp(hidden)) + norm(mixture(..))) * added_scale   after_norm, of the mixture: `after_norm`
//     residual   += norm(project(gate(residual) * per-layer row))               per_layer
//     residual   *= scale                                                       of the layer
#pragma once

#include "panels/panel_calls.hpp"
#include "layers/recurrent.hpp"

namespace quire {

// Who packed a weight: dense.isa.cpp, amx.cpp (as WeightType has them), or pack.cpp.
enum Packing : int64_t { kFloat32 = 0, kAmx = 1, kPanels = 2 };

// A weight that was packed, and its bias.
struct Linear {
    int64_t packing;
    int64_t format, arithmetic, group;  // of panels: Format, ComputeType, and inputs that share a given scale
    const void* packed;
    const float* bias;  // [out], or null
    int64_t num_in, num_out;
};

// Experts, of which each row uses a few.
struct MoE {
    Linear router;
    const float* router_norm;    // of the residual, for the router; null: it is given what the dense part is given
    const float* input_norm;     // the same for experts
    const float* dense_norm;     // of what the dense part comes to, before both are added; or null
    const float* after_norm;     // of what experts come to; or null
    const float* expert_scales;  // [expert], or null
    const Linear* gate_up;       // [expert, 2]; all experts are packed alike
    const Linear* down;          // [expert]
    int64_t num_experts, num_used, intermediate_size;  // no experts: there is no mixture
    int64_t softmax_over_all;    // whether weights are shares of all experts, or of those used
    int64_t is_sigmoid;          // whether a score counts by its sigmoid, not by its exponential
    const float* selection_bias;    // [expert], added to what experts are chosen by, not to what they count; or null
    const float* shared_expert_gate;     // [hidden]: its product with a row opens the dense part, by its sigmoid; or null
    double denominator_eps, scale;   // added to the sum that shares are of; what all weights are multiplied with
};

// Rows of another embedding that a layer mixes in.
struct PerLayer {
    Linear gate, project;
    const float* after_norm;
};

struct Layer {
    const float *input_norm, *attention_norm, *mlp_norm, *after_norm;  // each or null
    const float *query_norm, *key_norm, *value_norm;                   // each or null
    const float* sinks;  // [head], or null
    Linear qkv[4], out, gate_up[2], down;  // what cannot be one weight is several; outputs side by side, none: zeros
    MoE mixture;
    PerLayer per_layer;
    Recurrent recurrent;  // instead of attention, unless its kind is none
    int64_t window;  // -1: none
    int64_t num_kv_heads, head_size, intermediate_size;
    int64_t has_kv;        // whether it writes keys and values; else its store is an earlier layer's
    int64_t has_values;    // whether they are a product of their own; else what keys are before their norm
    int64_t has_gate;      // whether behind values come numbers whose sigmoids attention's answer is multiplied with
    int64_t query_span, key_span;  // numbers that query_norm and key_norm norm together; 0: they only multiply
    int64_t rope;          // which of the call's
    int64_t number;        // among the model's layers
    double scale;
};

struct LayerStore {
    void* keys;
    void* values;
    int64_t key_block_stride, value_block_stride;
};

// How fast each pair of a head's numbers turns.
struct RopeRule {
    const float* frequencies;  // [head size / 2]
    double scaling;            // on what is turned
    int64_t head_size;
    int64_t first;  // of its cosines and sines in a row of them
};

struct ForwardCall {
    Linear embedding, head;  // perhaps the same
    Linear per_layer_embedding, per_layer_projection;  // none: zeros
    const float* per_layer_norm;  // [per_layer_size]
    int64_t per_layer_size;
    double per_layer_scale, projection_scale, per_layer_sum_scale;
    const Layer* layers;
    const LayerStore* stores;  // one for each layer
    float* states;             // [slot, slot_size]: of recurrent layers
    int64_t slot_size;
    const RopeRule* ropes;
    int64_t num_layers, num_all_layers, num_ropes;  // layers of this call; layers of the model
    const float* norm;  // the last one
    double eps, scale, softcap;
    double embedding_scale, added_scale, logit_scale, logit_cap;
    double query_beta, query_origin;  // queries times 1 + beta log(1 + floor(position / origin)); beta 0: not so
    int64_t num_heads, hidden_size, gate;
    int64_t angles_size;                 // cosines of a row, of all ropes
    int64_t most_head_size, most_group;  // of any layer
    int64_t kv_type, block_size;
    // What is another in every step:
    const int64_t* tokens;  // [row]
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* slots;
    const int32_t* tables;
    const TileRow* members;
    const QueryTile* tiles;
    const int64_t* wanted;  // rows whose logits are wanted; the argmax_tokens token too of the first `num_sampled`
    const int64_t* needed;  // rows whose last hidden states are needed, upwards: those wanted, and perhaps others
    const int64_t* run_rows;   // [run + 1]: rows of one sequence are a run
    const int64_t* run_slots;  // [run]: where its recurrent state is
    int64_t num_tiles, num_rows, num_wanted, num_needed, num_sampled, num_threads, num_runs;
    // What is computed:
    float* hidden;       // [row, hidden]: the last hidden states of rows that are needed
    float* logits;       // [wanted, vocabulary]
    int64_t* argmax_tokens;  // [sampled], as argmax has it
    uint8_t* are_logits_finite;   // [sampled]: whether all logits of the row are finite
    uint8_t* is_finite;  // [row]: whether the last hidden state is; of a row that is not needed, what it attended to
    // What is between:
    float* residual;      // [row, hidden]
    float* added;         // as residual
    float* queries;       // [row, heads x head size]
    float* answers;       // as queries
    float* cos;           // [row, angles_size]
    float* sin;
    float* query_scales;  // [row]
    float* per_layer;     // [row, layer, per_layer_size]
    float* picked;        // [wanted, hidden]
    float* gates;         // as queries: of attention's answers
    float* qkv;           // [row of a chunk, queries, keys and values]; or what a recurrent layer makes of rows
    float* mixed;         // [row of a chunk, channel]
    float* rates;         // [row of a chunk, 2, head]
    float* gate_up;       // [row of a chunk, 2 x intermediate]
    float* gated;         // [row of a chunk, intermediate]
    int64_t chunk_rows;   // rows that go through a chain of products at once: what one makes is warm for the next
    double* seconds;      // [Part], or null: how long each part of this call took is added here
};

enum Part {
    kQkv, kOut, kGateUp, kDown, kAttention, kRopeWrite, kNorm, kGated, kEmbed, kHead, kArgmax, kRouter, kExperts, kPerLayer,
    kMix, kScan
};

// Throws std::out_of_range, and does nothing, if there is no such token or row.
void compute_step(const ForwardCall& call);

// From now on each layer of a step that is done adds one to this number, which another process may read; null: to none.
void count_layers(uint64_t* counter);

}  // namespace quire
