// What the CPU kernels are called with. Kernels see pointers, shapes and strides; they know no tensor library, own no
// memory and decide nothing. Every file that computes includes this one.
//
// The promise all of them keep: the bits of a row depend on that row's own inputs alone. Not on the other rows, their
// number, how rows are tiled, which physical blocks hold the keys and values, or how many threads run.
//
// Strides count elements, not bytes. Innermost dimensions are contiguous. A KV store has one of three types (KVType).
//
//     keys    [block, kv head, key size, slot]       transposed: one load holds several slots of one dimension
//     values  [block, kv head, slot, value size]
//
// In int8 these are codes, and behind the codes of a block's head lies a float32 scale for each slot.
#pragma once

#include <cstdint>

// Never out of line: of functions that several builds have in common the linker would keep one build's copy.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

enum class KVType : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// One row of the step: where its query lies, its position, and where its block table begins in the flat tables.
struct TileRow {
    int32_t row;
    int32_t position;
    int32_t table;
};

// Rows that go through blocks together: all of them through the first `num_shared` entries of the first member's table,
// then each alone through the rest of its own.
struct QueryTile {
    int32_t first_member;
    int32_t num_members;
    int32_t num_shared;
};

// Positions of a segment: attention goes through them with a running maximum of its own, and what segments found is
// folded in order. A multiple of every block size.
constexpr int kSegment = 1024;

// Segments [first, end) of a tile: all of its segments, or one of them. A tile in such pieces is a split tile; what its
// pieces found is kept in records until all are done.
struct TileSlice {
    int32_t tile;
    int32_t first_segment, end_segment;
    int32_t num_segments;  // of the whole tile
    int32_t split;         // which split tile it is of; -1: of none
    int64_t first_record;  // of that split tile
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
    const TileRow* members;
    const QueryTile* tiles;
    int64_t num_tiles;
    int64_t num_rows;        // rows with a member
    int64_t num_padded_rows; // rows of out; those behind num_rows are set to zero
    int window;              // a row sees this many positions up to its own; -1: all
    float scale;
    float softcap;           // 0: none
    int num_threads;         // at most
    const float* sinks = nullptr;  // [head]: a score that every row sees beside those of its slots, with no value; or null
    // What query_tiles.hpp adds:
    const TileSlice* pieces = nullptr;
    int64_t num_pieces = 0;
    char* scratch = nullptr;       // scratch_bytes per thread, aligned to 64
    int64_t scratch_bytes = 0;
    float* records = nullptr;      // [split tile, kv head, segment, line, value size + 2]
    int32_t* remaining = nullptr;  // [split tile, head]: segments not yet done; all of them between calls
};

// What a layer found comes to the residual: residual = (residual + norm(added) * added_scale) * scale.
struct ResidualCall {
    float* added;  // [row, size]; normed in place
    float* residual;
    const float* weight;  // of its norm; null: it is not normed
    int64_t size;
    float eps, added_scale, scale;
};

struct NormCall {
    const float* added;  // [row, size], or null: the residual is normed as it is
    float* residual;     // [row, size]; residual += added
    const float* weight;  // null: out is the residual as it is
    float* out;
    int64_t num_rows, size;
    float eps;
};

// What heads are multiplied with, after they are normed: each by itself, all together, or not at all.
struct HeadNorm {
    const float* weight;  // [span], or of all heads where the span is 0; null: heads stay as they are
    int64_t span;         // numbers that are normed together: a head, or all heads; 0: none are normed
};

struct RopeCall {
    const float* qkv;  // [row, heads + kv heads, key size], and from `value_at` on [kv heads, value size]
    int64_t qkv_stride;
    int64_t value_at;  // that of the keys, where values are what keys were before their norm
    const float* cos;  // [row, key size], rows `angle_stride` apart
    const float* sin;
    int64_t angle_stride;
    HeadNorm query_norm, key_norm, value_norm;
    const float* query_scales;  // [row], or null: queries are multiplied with them
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
};

// What a gate lets through of `up`. All are x * sigmoid(f(x)) * g(up):
//
//     silu          f = x
//     gelu_tanh     f = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//     clamped_silu  f = 1.702 x, x up to 7, g = 1 + up, up from -7 to 7 (gpt-oss)
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped_silu = 2 };

struct GateCall {
    const float* gate;  // [row, size], rows `stride` apart
    const float* up;
    int64_t stride, up_stride;
    float* out;  // [row, size]
    int64_t num_rows, size;
    Gate kind;
};

// out = the sum of so many rows of `parts`, each multiplied with its weight, in their order.
struct MixCall {
    const float* parts;      // [part, size]
    const int32_t* indices;  // of parts
    const float* weights;
    int64_t count, size;
    float* out;
};

// logits = cap * tanh(logits * scale / cap), or logits * scale where there is no cap.
struct LogitCall {
    float* logits;  // [row, size]
    int64_t size;
    float scale, cap;  // 0: none
};

struct ArgmaxCall {
    const float* logits;  // [row, size]
    int64_t stride;
    int64_t* out;         // first index of the largest number; of a row that is not finite, some index
    uint8_t* is_finite;   // whether every number of the row is finite
    int64_t num_rows, size;
};

class TeamThread;  // team.hpp

constexpr int64_t kElementsPerTask = 1024;  // numbers of a row that are one task where a row has little to do

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
    char* scratch;  // scratch_bytes, aligned to 64
};

// Rows of a packed weight as they were before, but for rounding: an embedding that is also the head is held once.
struct GatherCall {
    const void* packed;
    int64_t num_out, num_in;
    const int64_t* indices;  // of outputs
    int64_t num_rows;
    float* out;  // [index, in]
};

// Products with weights of one type. How a weight is packed is between the functions of one of these.
//
// A product has two phases: rows are made ready in the scratch, where they must be, inputs [first, end) of a row at a
// time; then they are multiplied. `first` is a multiple of kElementsPerTask, and so is `end`, or it is the row's.
struct Products {
    int64_t (*packed_bytes)(int64_t num_out, int64_t num_in);
    int64_t (*scratch_bytes)(int64_t num_rows, int64_t num_in);
    void (*pack)(const PackCall&);
    int64_t (*num_converted_rows)(const ProductCall&);  // of the scratch; 0: rows are read as they are
    void (*convert_input_row)(const ProductCall&, int64_t row, int64_t first, int64_t end);
    int64_t (*num_tasks)(const ProductCall&);  // that multiply it; each reads a part of the weight
    void (*multiply)(const ProductCall&, int64_t task);
    void (*rows)(const GatherCall&);
};

// Numbers of a row that a token is drawn from, in either width: one of the two is null.
struct LogitRow {
    const float* narrow;
    const double* wide;
    int64_t size;
};

// heated = (in - peak) / temperature, and e to its power.
struct SoftmaxCall {
    LogitRow in;
    double peak, temperature;
    double* heated;  // null: not needed
    double* out;
};

// Those that are not less than the least, and where they stand, to room for all. Returns how many.
struct FilterCall {
    const double* in;
    int64_t size;
    double least;
    double* picked;
    int64_t* places;
};

struct PanelProducts;  // panel_products.hpp
struct RecurrentCall;  // recurrent.hpp

// One build of all kernels for one instruction set. What takes a thread of a team is called by all of its threads, and
// returns when no task is left to be taken: others may still be at theirs.
struct Kernels {
    const char* isa;
    void (*attention)(const AttentionCall&, TeamThread&);
    void (*norm_row)(const NormCall&, int64_t row);
    void (*rope_row)(const RopeCall&, int64_t row);
    void (*add_residual_row)(const ResidualCall&, int64_t row);
    void (*gate_part)(const GateCall&, int64_t row, int64_t first, int64_t end);
    void (*mix)(const MixCall&);
    void (*logit_part)(const LogitCall&, int64_t row, int64_t first, int64_t end);
    void (*argmax_row)(const ArgmaxCall&, int64_t row);
    void (*conv1d)(const RecurrentCall&, int64_t run, int64_t first, int64_t end);  // channels
    void (*compute_decays)(const RecurrentCall&, int64_t row);
    void (*scan_run)(const RecurrentCall&, int64_t run, int64_t head, int64_t block);  // of columns
    void (*norm_and_gate_row)(const RecurrentCall&, int64_t row);
    void (*apply_output_gate)(const float* gates, float* answers, int64_t size);  // answers times sigmoids of gates
    void (*exp)(const float* in, float* out, int64_t size);
    void (*exp_double)(const double* in, double* out, int64_t size);
    double (*largest)(const LogitRow&);
    void (*exp_scaled)(const SoftmaxCall&);
    int64_t (*pick)(const FilterCall&);
    double (*read_sum)(const void* data, int64_t num_bytes, int num_threads);
    const Products *float32, *bfloat16;  // by the type of the weights
    const PanelProducts* panels;
};

// What a head may measure: vectors cover eight numbers or sixteen, and a tail of eight is the only one.
constexpr int kMinHeadSize = 32, kMaxHeadSize = 512, kHeadStep = 8;

}  // namespace quire
