// All layers of a decoder over one step's rows, behind one call. Every field is eight bytes wide, because the caller
// (backends/cpu/layers.py) lays these structures out by itself. They own nothing.
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
    const Layer* layers;
    const LayerStore* stores;  // one for each layer
    int64_t num_layers;
    const float* norm;  // the last one
    double eps, scale;
    int64_t num_heads, num_kv_heads, head_size, hidden_size, intermediate_size;
    int64_t key_block_stride, value_block_stride, kv_type, block_size;
    const float* cos;  // [row, head size]
    const float* sin;
    const int64_t* blocks;  // [row]
    const int64_t* slots;
    const int32_t* tables;
    const Member* members;
    const Tile* tiles;
    int64_t num_tiles, num_rows;
    float* residual;     // [row, hidden]: the embedded rows; changed
    float* hidden;       // [row, hidden]: the last hidden states
    uint8_t* is_finite;  // [row]: whether the last hidden state is
    float* added;        // [row, hidden], and so on: what is between
    float* queries;      // [row, heads x head size]
    float* answers;      // as queries
    float* qkv;          // [row of a chunk, queries, keys and values]
    float* gate_up;      // [row of a chunk, 2 x intermediate]
    float* gated;        // [row of a chunk, intermediate]
    int64_t chunk_rows;  // rows that go through a chain of products at once: what one makes is warm for the next
    int64_t num_threads;
    double* seconds;  // [Part], or null: how long each part of this call took is added here
};

enum Part { kQkv, kOut, kGateUp, kDown, kAttention, kRopeWrite, kNorm, kSilu };

void compute_layers(const DecoderCall& call);

}  // namespace quire
