// A decoder over one step's rows, from tokens to logits, behind one call. Every field is eight bytes wide, because the
// caller (backends/cpu/layers.py) lays these structures out by itself. They own nothing.
#pragma once

#include "panel_products.hpp"

namespace quire {

// Who packed a weight: products.cpp, products_amx.cpp (as WeightType has them), or panels_pack.cpp.
enum Packing : int64_t { kFloat32 = 0, kTiles = 1, kPanels = 2 };

// A weight that was packed, and its bias.
struct Linear {
    int64_t packing;
    int64_t format, arithmetic, group;  // of panels: Format, Arithmetic, and inputs that share a given scale
    const void* packed;
    const float* bias;  // [out], or null
    int64_t num_in, num_out;
};

struct Layer {
    const float* input_norm;
    const float* query_norm;  // [head size], or null
    const float* key_norm;
    const float* post_norm;
    Linear qkv[3], out, gate_up[2], down;  // what cannot be one weight is several; outputs side by side, none: zeros
    int64_t window;  // -1: none
};

struct LayerStore {
    void* keys;
    void* values;
};

struct DecoderCall {
    Linear embedding, head;  // perhaps the same
    const Layer* layers;
    const LayerStore* stores;  // one for each layer
    int64_t num_layers;
    const float* norm;  // the last one
    double eps, scale;
    const float* frequencies;  // [head size / 2]: how fast each pair turns
    double rope_scaling;       // on what is turned
    int64_t num_heads, num_kv_heads, head_size, hidden_size, intermediate_size;
    int64_t key_block_stride, value_block_stride, kv_type, block_size;
    // What is another in every step:
    const int64_t* tokens;  // [row]
    const int64_t* positions;
    const int64_t* blocks;
    const int64_t* slots;
    const int32_t* tables;
    const Member* members;
    const Tile* tiles;
    const int64_t* wanted;  // rows whose logits are wanted; the likeliest token too of the first `num_sampled`
    const int64_t* needed;  // rows whose last hidden states are needed, upwards: those wanted, and perhaps others
    int64_t num_tiles, num_rows, num_wanted, num_needed, num_sampled, num_threads;
    // What is computed:
    float* hidden;       // [row, hidden]: the last hidden states of rows that are needed
    float* logits;       // [wanted, vocabulary]
    int64_t* likeliest;  // [sampled], as argmax has it
    uint8_t* is_sound;   // [sampled]: whether all logits of the row are finite
    uint8_t* is_finite;  // [row]: whether the last hidden state is; of a row that is not needed, what it attended to
    // What is between:
    float* residual;     // [row, hidden]
    float* added;        // as residual
    float* queries;      // [row, heads x head size]
    float* answers;      // as queries
    float* cos;          // [row, head size]
    float* sin;
    float* picked;       // [wanted, hidden]
    float* qkv;          // [row of a chunk, queries, keys and values]
    float* gate_up;      // [row of a chunk, 2 x intermediate]
    float* gated;        // [row of a chunk, intermediate]
    int64_t chunk_rows;  // rows that go through a chain of products at once: what one makes is warm for the next
    double* seconds;  // [Part], or null: how long each part of this call took is added here
};

enum Part { kQkv, kOut, kGateUp, kDown, kAttention, kRopeWrite, kNorm, kSilu, kEmbed, kHead, kArgmax };

// Throws std::out_of_range, and does nothing, if there is no such token or row.
void compute_step(const DecoderCall& call);

}  // namespace quire
