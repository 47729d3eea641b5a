// What the CPU kernels are called with. Kernels see pointers, shapes and strides; they know no tensor library, own no
// memory and decide nothing. Every file that computes includes this one.
//
// The promise all of them keep: the bits of a row depend on that row's own inputs alone. Not on the other rows, their
// number, how rows are tiled, which physical blocks hold the keys and values, or how many threads run.
//
// Strides count elements, not bytes. Innermost dimensions are contiguous. A KV store has one of two types (KVType).
//
//     keys    [block, kv head, key size, slot]       transposed: one load holds several slots of one dimension
//     values  [block, kv head, slot, value size]
#pragma once

#include <cstdint>

// Never out of line: of functions that several builds have in common the linker would keep one build's copy.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

enum class KVType : int { float32 = 0, bfloat16 = 1 };

// One row of the step: where its query lies, its position, and where its block table begins in the flat tables.
struct Member {
    int32_t row;
    int32_t position;
    int32_t table;
};

// Rows that go through blocks together: all of them through the first `num_shared` entries of the first member's table,
// then each alone through the rest of its own.
struct Tile {
    int32_t first_member;
    int32_t num_members;
    int32_t num_shared;
};

struct AttentionCall {
    const float* queries;  // [row, head, key size]
    int64_t query_stride;
    float* out;  // [row, head, value size]
    int64_t out_stride;
    const void* keys;
    int64_t key_block_stride;
    const void* values;
    int64_t value_block_stride;
    KVType kv_type;
    int num_heads, num_kv_heads, key_size, value_size, block_size;
    const int32_t* tables;
    const Member* members;
    const Tile* tiles;
    int64_t num_tiles;
    int64_t num_rows;        // rows with a member
    int64_t num_padded_rows; // rows of out; those behind num_rows are set to zero
    int window;              // a row sees this many positions up to its own; -1: all
    float scale;
    float softcap;           // 0: none
    int num_threads;
    char* scratch;           // scratch_bytes per thread, aligned to 64
    int64_t scratch_bytes;
};

struct NormCall {
    const float* added;  // [row, size], or null: the residual is normed as it is
    float* residual;     // [row, size]; residual += added
    const float* weight;
    float* out;
    int64_t num_rows, size;
    float eps;
    int num_threads;
};

struct RopeCall {
    const float* qkv;  // [row, heads + kv heads, key size], then [kv heads, value size] of the same row
    int64_t qkv_stride;
    const float* cos;  // [row, key size]
    const float* sin;
    const float* query_norm;  // [key size], or null
    const float* key_norm;
    float eps;
    void* keys;
    int64_t key_block_stride;
    void* values;
    int64_t value_block_stride;
    KVType kv_type;
    const int64_t* blocks;  // [row]; rows of block 0, the null block, are padding and write nothing
    const int64_t* slots;
    float* queries;  // [row, head, key size]
    int64_t num_rows;
    int num_heads, num_kv_heads, key_size, value_size, block_size;
    int num_threads;
};

struct SiluCall {
    const float* gate_up;  // [row, 2 * size]: gate, then up
    float* out;            // [row, size]
    int64_t num_rows, size;
    int num_threads;
};

struct ArgmaxCall {
    const float* logits;  // [row, size]
    int64_t stride;
    int64_t* out;         // first index of the largest number; of a row that is not finite, some index
    uint8_t* is_finite;   // whether every number of the row is finite
    int64_t num_rows, size;
    int num_threads;
};

enum class WeightType : int { float32 = 0, bfloat16 = 1 };

struct PackCall {
    const float* weight;  // [out, in]
    int64_t num_out, num_in;
    void* packed;  // packed_bytes, aligned to 64
    int num_threads;
};

struct ProductCall {
    const float* rows;  // [row, in]
    int64_t row_stride;
    const void* packed;
    const float* bias;  // [out], or null
    float* out;         // [row, out]
    int64_t out_stride;
    int64_t num_rows, num_in, num_out;
    int num_threads;
    char* scratch;  // scratch_bytes, aligned to 64
};

// Rows of a packed weight as they were before, but for rounding: an embedding that is also the head is held once.
struct RowsCall {
    const void* packed;
    int64_t num_out, num_in;
    const int64_t* indices;  // of outputs
    int64_t num_rows;
    float* out;  // [index, in]
};

// Products with weights of one type. How a weight is packed is between the functions of one of these.
struct Products {
    int64_t (*packed_bytes)(int64_t num_out, int64_t num_in);
    int64_t (*scratch_bytes)(int64_t num_rows, int64_t num_in);
    void (*pack)(const PackCall&);
    void (*product)(const ProductCall&);
    void (*rows)(const RowsCall&);
};

struct PanelProducts;  // panel_products.hpp

// One build of all kernels for one instruction set.
struct Kernels {
    const char* isa;
    void (*attention)(const AttentionCall&);
    void (*add_rms_norm)(const NormCall&);
    void (*rope_write)(const RopeCall&);
    void (*silu_mul)(const SiluCall&);
    void (*argmax)(const ArgmaxCall&);
    void (*exp)(const float* in, float* out, int64_t size);
    void (*exp_double)(const double* in, double* out, int64_t size);
    double (*read_sum)(const void* data, int64_t num_bytes, int num_threads);
    const Products *float32, *bfloat16;  // by the type of the weights
    const PanelProducts* panels;
};

// What a head may measure: vectors cover eight numbers or sixteen, and a tail of eight is the only one.
constexpr int kMinHeadSize = 32, kMaxHeadSize = 256, kHeadStep = 8;

}  // namespace quire
