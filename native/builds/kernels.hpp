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

// A tile: rows (members) that read KV blocks together. First all rows read the `num_shared` leading blocks, which are
// common to all block tables of the tile; then each row reads the other blocks of its own table.
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
    int window;              // sliding window: the last positions that a row attends to, its own included; -1: all
    float scale;
    float softcap;           // 0: none
    int num_threads;         // maximum
    const float* sinks = nullptr;  // [head]: attention sinks, an additional score per row that has no value; or null
    // Set by query_tiles.hpp:
    const TileSlice* pieces = nullptr;
    int64_t num_pieces = 0;
    char* scratch = nullptr;       // scratch_bytes per thread, aligned to 64
    int64_t scratch_bytes = 0;
    float* records = nullptr;      // [split tile, kv head, segment, line, value size + 2]
    int32_t* remaining = nullptr;  // [split tile, head]: segments not yet done; reset to all segments between calls
};

// Adds the output of a layer to the residual: residual = (residual + norm(added) * added_scale) * scale.
struct ResidualCall {
    float* added;  // [row, size]; normalized in place
    float* residual;
    const float* weight;  // norm weight of `added`; null: `added` is not normalized
    int64_t size;
    float eps, added_scale, scale;
};

struct NormCall {
    const float* added;  // [row, size], or null: nothing is added before the norm
    float* residual;     // [row, size]; residual += added
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
    int64_t value_at;  // equal to the offset of the keys if values are the keys before their norm
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
struct MixCall {
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

constexpr int64_t kElementsPerTask = 1024;  // elements of a row per task, in cheap elementwise work

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

// Unpacks rows of a packed weight, exact up to rounding: an embedding that is also the head is stored once, packed.
struct GatherCall {
    const void* packed;
    int64_t num_out, num_in;
    const int64_t* indices;  // indices of outputs
    int64_t num_rows;
    float* out;  // [index, in]
};

// Matrix products with weights of one type. The packed layout is private to the functions of one `Products`.
//
// Rows are multiplied after their conversion in the scratch memory, if needed, of inputs [first, end) of a row per
// call; `first` is a multiple of kElementsPerTask, and `end` too, unless it is the end of the row.
struct Products {
    int64_t (*packed_bytes)(int64_t num_out, int64_t num_in);
    int64_t (*scratch_bytes)(int64_t num_rows, int64_t num_in);
    void (*pack)(const PackCall&);
    int64_t (*num_converted_rows)(const ProductCall&);  // rows in the scratch memory; 0: rows are not converted
    void (*convert_input_row)(const ProductCall&, int64_t row, int64_t first, int64_t end);
    int64_t (*num_tasks)(const ProductCall&);  // tasks of the second phase; each reads a part of the weight
    void (*multiply)(const ProductCall&, int64_t task);
    void (*rows)(const GatherCall&);
};

// A row of logits from which a token is sampled, as float (`narrow`) or double (`wide`): one of the pointers is null.
struct LogitRow {
    const float* narrow;
    const double* wide;
    int64_t size;
};

// heated = (in - peak) / temperature, out = exp(heated).
struct SoftmaxCall {
    LogitRow in;
    double peak, temperature;
    double* heated;  // null: not needed
    double* out;
};

// Selects values >= `least` with their indices, and returns their number. `picked` and `places` have `size` elements.
struct FilterCall {
    const double* in;
    int64_t size;
    double least;
    double* picked;
    int64_t* places;
};

struct PanelProducts;  // panel_products.hpp
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
    void (*mix)(const MixCall&);
    void (*logit_part)(const LogitCall&, int64_t row, int64_t first, int64_t end);
    void (*argmax_row)(const ArgmaxCall&, int64_t row);
    void (*conv1d)(const RecurrentCall&, int64_t run, int64_t first, int64_t end);  // channels
    void (*compute_decays)(const RecurrentCall&, int64_t row);
    void (*scan_run)(const RecurrentCall&, int64_t run, int64_t head, int64_t block);  // block of columns
    void (*norm_and_gate_row)(const RecurrentCall&, int64_t row);
    void (*apply_output_gate)(const float* gates, float* answers, int64_t size);  // answers *= sigmoid(gates)
    void (*exp)(const float* in, float* out, int64_t size);
    void (*exp_double)(const double* in, double* out, int64_t size);
    double (*largest)(const LogitRow&);
    void (*exp_scaled)(const SoftmaxCall&);
    int64_t (*pick)(const FilterCall&);
    double (*read_sum)(const void* data, int64_t num_bytes, int num_threads);
    const Products *float32, *bfloat16;  // by the type of the weights
    const PanelProducts* panels;
};

// Bounds of head sizes. Kernels support vectors of 8 or 16 elements and no remainder other than 8.
constexpr int kMinHeadSize = 32, kMaxHeadSize = 512, kHeadStep = 8;

}  // namespace quire
