// Arguments of the CPU kernels: pointers, shapes and strides. Kernels depend on no tensor library, allocate no memory
// and make no scheduling decisions. Included by every file with kernels.
//
// All kernels guarantee that the bits of an output row depend only on the inputs of that row, not on other rows, the
// number of rows, the tiling, the physical blocks of keys and values, or the number of threads.
//
// Strides count elements, not bytes. Innermost dimensions are contiguous. A KV store has one of three types (KVType).
//
//     keys    [block, kv head, key size, slot]       transposed: one load holds several slots of one dimension
//     values  [block, kv head, slot, value size]
//
// With int8 these are quantized codes; the codes of each head of a block are followed by one float32 scale per slot.
#pragma once

#include <cstdint>

// Forces inlining: of an out-of-line function that several builds contain, the linker would keep only one build's copy.
#define QUIRE_INLINE inline __attribute__((always_inline))

namespace quire {

enum class KVType : int { float32 = 0, bfloat16 = 1, int8 = 2 };

// One row of the step: the index of its query, its position, and the start of its block table in the flat tables.
struct TileRow {
    int32_t row;
    int32_t position;
    int32_t table;
};

// A tile: rows, its members, that read KV blocks together. First all read the `num_shared` leading blocks, which are
// common to all block tables of the tile; then each member reads the other blocks of its own table.
struct QueryTile {
    int32_t first_member;
    int32_t num_members;
    int32_t num_shared;
};

// Number of positions per segment. Attention computes each segment with a separate running maximum and combines the
// results of segments in order. A multiple of every block size.
constexpr int kSegment = 1024;

// A slice: segments [first, end) of a tile, either all or one. A tile with several slices is a split tile; the partial
// results of its slices are stored in records until all slices are done.
struct TileSlice {
    int32_t tile;
    int32_t first_segment, end_segment;
    int32_t num_segments;  // of the whole tile
    int32_t split;         // index of the split tile; -1: the tile is not split
    int64_t first_record;  // first record of the split tile
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
    int64_t num_padded_rows; // rows of out; rows from num_rows on are set to zero
    int window;              // sliding window: number of positions that a row attends to, with its own; -1: all
    float scale;
    float softcap;           // 0: none
    int num_threads;         // maximum
    const float* sinks = nullptr;  // [head]: attention sinks, an additional score per row that has no value; or null
    // Set by query_tiles.hpp:
    const TileSlice* slices = nullptr;
    int64_t num_slices = 0;
    char* scratch = nullptr;       // scratch_bytes per thread, aligned to 64
    int64_t scratch_bytes = 0;
    float* records = nullptr;      // [split tile, kv head, segment, line, value size + 2]
    int32_t* remaining = nullptr;  // [split tile, head]: segments not yet done; reset to all segments between calls
};

// Adds the output of a layer to the residual: residual = (residual + norm(delta) * delta_scale) * scale.
struct ResidualCall {
    float* delta;  // [row, size]: output of the layer; normalized in place
    float* residual;
    const float* weight;  // norm weight of `delta`; null: `delta` is not normalized
    int64_t size;
    float eps, delta_scale, scale;
};

struct NormCall {
    const float* delta;  // [row, size]: added to the residual before the norm; null: nothing is added
    float* residual;     // [row, size]
    const float* weight;  // null: out is the residual, not normalized
    float* out;
    int64_t num_rows, size;
    float eps;
};

// Norm of query, key or value heads: per head, over all heads together, or none.
struct HeadNorm {
    const float* weight;  // [span], or if the span is 0, weights of all heads; null: heads are not changed
    int64_t span;         // number of values normalized together: one head, or all heads; 0: no normalization
};

struct RopeCall {
    const float* qkv;  // [row, heads + kv heads, key size], and from `value_at` on [kv heads, value size]
    int64_t qkv_stride;
    int64_t value_offset;  // equal to the offset of the keys if values are the keys before their norm
    const float* cos;  // [row, key size], row stride `angle_stride`
    const float* sin;
    int64_t angle_stride;
    HeadNorm query_norm, key_norm, value_norm;
    const float* query_scales;  // [row]: factors of queries, or null
    float eps;
    void* keys;
    int64_t key_block_stride;
    void* values;
    int64_t value_block_stride;
    KVType kv_type;
    const int64_t* blocks;  // [row]; rows with block 0 (the null block) are padding: no keys or values are written
    const int64_t* slots;
    float* queries;  // [row, head, key size]
    int64_t num_rows;
    int num_heads, num_kv_heads, key_size, value_size, block_size;
};

// Gated activation functions: x * sigmoid(f(x)) * g(up), where x is the gate and by default g(up) = up.
//
//     silu          f = x
//     gelu_tanh     f = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//     clamped_silu  f = 1.702 x with x at most 7, g = 1 + up with up from -7 to 7 (gpt-oss)
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped_silu = 2 };

struct GateCall {
    const float* gate;  // [row, size], row stride `stride`
    const float* up;
    int64_t stride, up_stride;
    float* out;  // [row, size]
    int64_t num_rows, size;
    Gate kind;
};

// out = sum over i < count of parts[indices[i]] * weights[i], in this order.
struct WeightedSumCall {
    const float* parts;      // [part, size]
    const int32_t* indices;  // rows of `parts`
    const float* weights;
    int64_t count, size;
    float* out;
};

// logits = cap * tanh(logits * scale / cap), or logits * scale without a cap.
struct LogitCall {
    float* logits;  // [row, size]
    int64_t size;
    float scale, cap;  // cap 0: no cap
};

struct ArgmaxCall {
    const float* logits;  // [row, size]
    int64_t stride;
    int64_t* out;         // first index of the largest value; any index if the row is not finite
    uint8_t* is_finite;   // whether all values of the row are finite
    int64_t num_rows, size;
};

class TeamThread;  // team.hpp

constexpr int64_t kElementsPerTask = 1024;  // elements of a row per task, for elementwise kernels

enum class WeightType : int { float32 = 0, bfloat16 = 1 };

struct PackCall {
    const float* weight;  // [out, in]
    int64_t num_out, num_in;
    void* packed;  // packed_bytes, aligned to 64
    int num_threads;
};

struct MatmulCall {
    const float* rows;  // [row, in]
    int64_t row_stride;
    const void* packed;
    const float* bias;  // [out], or null
    float* out;         // [row, out]
    int64_t out_stride;
    int64_t num_rows, num_in, num_out;
    char* scratch;  // scratch_bytes, aligned to 64
};

// Unpacks rows of a packed weight, exact up to rounding: an embedding that is also the head is stored once, packed.
struct GatherCall {
    const void* packed;
    int64_t num_out, num_in;
    const int64_t* indices;  // indices of outputs
    int64_t num_rows;
    float* out;  // [index, in]
};

// Matrix products of float rows with weights of one type. Only the functions of one table know its packed layout.
//
// Some kernels first convert the rows into the scratch memory. One call of convert_input_row converts the inputs
// [first, end) of a row; `first` is a multiple of kElementsPerTask, and so is `end`, unless it is the end of the row.
struct MatmulKernels {
    int64_t (*packed_bytes)(int64_t num_out, int64_t num_in);
    int64_t (*scratch_bytes)(int64_t num_rows, int64_t num_in);
    void (*pack)(const PackCall&);
    int64_t (*num_converted_rows)(const MatmulCall&);  // number of rows to convert; 0: none
    void (*convert_input_row)(const MatmulCall&, int64_t row, int64_t first, int64_t end);
    int64_t (*num_tasks)(const MatmulCall&);  // tasks of the second phase; each reads a part of the weight
    void (*multiply)(const MatmulCall&, int64_t task);
    void (*rows)(const GatherCall&);
};

// A row of logits from which a token is sampled, either as floats or as doubles; the other pointer is null.
struct LogitRow {
    const float* floats;
    const double* doubles;
    int64_t size;
};

// Softmax without its division: exponents = (in - peak) / temperature, out = exp(exponents).
struct SoftmaxCall {
    LogitRow in;
    double peak, temperature;
    double* exponents;  // null: not needed
    double* out;
};

// Copies the elements of `in` that are >= `minimum` to `values`, and their positions to `indices` (both [size]).
struct FilterCall {
    const double* in;
    int64_t size;
    double minimum;
    double* values;
    int64_t* indices;
};

struct PanelKernels;   // panel_calls.hpp
struct RecurrentCall;  // recurrent.hpp

// One build of all kernels, for one instruction set. A kernel with a TeamThread parameter is called by all threads of
// the team; it returns when no task is left to take, while other threads may still be working on tasks.
struct Kernels {
    const char* isa;
    void (*attention)(const AttentionCall&, TeamThread&);
    void (*norm_row)(const NormCall&, int64_t row);
    void (*rope_row)(const RopeCall&, int64_t row);
    void (*add_residual_row)(const ResidualCall&, int64_t row);
    void (*gate_part)(const GateCall&, int64_t row, int64_t first, int64_t end);
    void (*weighted_sum)(const WeightedSumCall&);
    void (*logit_part)(const LogitCall&, int64_t row, int64_t first, int64_t end);
    void (*argmax_row)(const ArgmaxCall&, int64_t row);
    void (*conv1d)(const RecurrentCall&, int64_t run, int64_t first, int64_t end);  // channels [first, end)
    void (*compute_decays)(const RecurrentCall&, int64_t row);
    void (*scan_run)(const RecurrentCall&, int64_t run, int64_t head, int64_t block);  // block of columns
    void (*norm_and_gate_row)(const RecurrentCall&, int64_t row);
    void (*apply_output_gate)(const float* gates, float* outputs, int64_t size);  // outputs *= sigmoid(gates)
    void (*exp)(const float* in, float* out, int64_t size);
    void (*exp_double)(const double* in, double* out, int64_t size);
    double (*max_logit)(const LogitRow&);
    void (*exp_scaled)(const SoftmaxCall&);
    int64_t (*filter)(const FilterCall&);
    double (*read_sum)(const void* data, int64_t num_bytes, int num_threads);
    const MatmulKernels *float32, *bfloat16;  // for weights of this type
    const PanelKernels* panels;
};

// Bounds of head sizes, which are multiples of kHeadStep: a vector has at most 16 elements, so the remainder is 0 or 8.
constexpr int kMinHeadSize = 32, kMaxHeadSize = 512, kHeadStep = 8;

}  // namespace quire
