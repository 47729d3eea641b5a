// Products with bf16 weights in AMX tile registers. Rows are rounded to bf16 once per call. Sums are float32; the sum
// of an output runs over pairs of inputs in their order and does not depend on other rows or outputs.
//
//     weight [out, in]  ->  [panel of 32 outputs][32 inputs][2 tiles of 16 outputs][16 pairs of inputs][16][2]
//
// Compiled for CPUs with AMX and called only after `request_permission`. Uses no standard library (see simd.isa.hpp).
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "products/amx.hpp"

namespace quire::amx {
namespace {

typedef uint16_t bf16;

constexpr int kSide = 16;               // rows per tile, and outputs per tile
constexpr int kInputs = 32;             // inputs per tile
constexpr int kWidth = 2 * kSide;       // outputs per panel
constexpr int kTile = kSide * kInputs;  // elements per tile
constexpr int64_t kPrefetchBytes = 8192;
constexpr int64_t kRowsInL2 = 256;  // rows that fit in the L2 cache and are multiplied with all panels
constexpr int64_t kPanelsPerTask = 3;          // consecutive panels multiplied while the rows are in the L1 cache

int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// Row stride of the scratch memory: an odd number of cache lines, to avoid cache set conflicts within a tile.
int64_t stride_of(int64_t num_in) { return (round_up(num_in, kInputs) / kInputs | 1) * kInputs; }

int64_t packed_bytes(int64_t num_out, int64_t num_in) {
    return round_up(num_out, kWidth) * round_up(num_in, kInputs) * static_cast<int64_t>(sizeof(bf16));
}

int64_t scratch_bytes(int64_t num_rows, int64_t num_in) {
    return round_up(num_rows, kSide) * stride_of(num_in) * static_cast<int64_t>(sizeof(bf16));
}

bf16 to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return x != x ? 0x7FC0 : static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The index of the weight of an output and an input in the packed layout.
int64_t packed_index(int64_t output, int64_t input, int64_t num_chunks) {
    const int64_t panel = output / kWidth, lane = output % kWidth, chunk = input / kInputs, i = input % kInputs;
    return ((panel * num_chunks + chunk) * 2 + lane / kSide) * kTile + i / 2 * 2 * kSide + lane % kSide * 2 + i % 2;
}

void pack(const PackCall& call) {
    const int64_t chunks = round_up(call.num_in, kInputs) / kInputs, panels = round_up(call.num_out, kWidth) / kWidth;
#pragma omp parallel for schedule(static) num_threads(call.num_threads)
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t chunk = 0; chunk < chunks; ++chunk)
            for (int64_t output = panel * kWidth; output < (panel + 1) * kWidth; ++output)
                for (int64_t input = chunk * kInputs; input < (chunk + 1) * kInputs; ++input) {
                    const bool is_inside = output < call.num_out && input < call.num_in;
                    static_cast<bf16*>(call.packed)[packed_index(output, input, chunks)] =
                        is_inside ? to_bf16(call.weight[output * call.num_in + input]) : bf16{0};
                }
}

void rows(const GatherCall& call) {
    const int64_t chunks = round_up(call.num_in, kInputs) / kInputs;
    for (int64_t row = 0; row < call.num_rows; ++row)
        for (int64_t i = 0; i < call.num_in; ++i) {
            const bf16 weight = static_cast<const bf16*>(call.packed)[packed_index(call.indices[row], i, chunks)];
            const uint32_t bits = static_cast<uint32_t>(weight) << 16;
            __builtin_memcpy(call.out + row * call.num_in + i, &bits, sizeof bits);
        }
}

// Rounds the inputs of a row to bf16. The padding after the last input and the padding rows are set to zero.
void convert_input_row(const MatmulCall& call, int64_t row, int64_t first, int64_t end) {
    const int64_t stride = stride_of(call.num_in);
    bf16* to = reinterpret_cast<bf16*>(call.scratch) + row * stride;
    int64_t i = first;
    if (row < call.num_rows) {
        const float* from = call.rows + row * call.row_stride;
        for (; i + 32 <= end; i += 32) {
            const __m512bh pair = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
            __builtin_memcpy(to + i, &pair, sizeof pair);
        }
        for (; i < end; ++i) to[i] = to_bf16(from[i]);
    }
    for (; i < (end == call.num_in ? stride : end); ++i) to[i] = 0;
}

int64_t num_converted_rows(const MatmulCall& call) { return round_up(call.num_rows, kSide); }

struct alignas(64) AmxTileConfig {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Stores the sums of T tiles of rows, with row stride `stride`.
template <int T>
void store_tiles(float* to, int64_t stride) {
    _tile_stored(0, to, stride * 4);
    _tile_stored(1, to + kSide, stride * 4);
    if constexpr (T == 2) {
        _tile_stored(2, to + kSide * stride, stride * 4);
        _tile_stored(3, to + kSide * stride + kSide, stride * 4);
    }
}

// Writes sums to the output: directly if the tiles are complete and there is no bias, else through a buffer.
template <int T>
void write_sums(const MatmulCall& call, int64_t row, int64_t first) {
    float* out = call.out + row * call.out_stride + first;
    const int64_t remaining = call.num_rows - row, num_rows = remaining < T * kSide ? remaining : T * kSide;
    const int64_t width = call.num_out - first < kWidth ? call.num_out - first : kWidth;
    if (call.bias == nullptr && num_rows == T * kSide && width == kWidth) return store_tiles<T>(out, call.out_stride);
    alignas(64) float sums[T * kSide * kWidth];
    store_tiles<T>(sums, kWidth);
    for (int64_t r = 0; r < num_rows; ++r)
        for (int64_t n = 0; n < width; ++n)
            out[r * call.out_stride + n] = sums[r * kWidth + n] + (call.bias == nullptr ? 0.0f : call.bias[first + n]);
}

// Multiplies T (one or two) tiles of rows with a panel. Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 rows.
template <int T>
void micro_kernel(const MatmulCall& call, int64_t row, int64_t panel, bool is_first) {
    const int64_t stride = stride_of(call.num_in), chunks = round_up(call.num_in, kInputs) / kInputs;
    const bf16* rows = reinterpret_cast<const bf16*>(call.scratch) + row * stride;
    const bf16* weights = static_cast<const bf16*>(call.packed) + panel * chunks * 2 * kTile;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (T == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk, rows += kInputs, weights += 2 * kTile) {
        if (is_first)
            for (int line = 0; line < 2 * kTile * 2 / 64; ++line)
                __builtin_prefetch(reinterpret_cast<const char*>(weights) + kPrefetchBytes + 64 * line);
        _tile_loadd(4, weights, 64);
        _tile_loadd(5, weights + kTile, 64);
        _tile_loadd(6, rows, stride * 2);
        _tile_dpbf16ps(0, 6, 4);
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (T == 2) {
            _tile_loadd(7, rows + kSide * stride, stride * 2);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    write_sums<T>(call, row, panel * kWidth);
}

int64_t num_panels(const MatmulCall& call) { return round_up(call.num_out, kWidth) / kWidth; }

// Number of panels per task.
int64_t set_size(const MatmulCall& call) { return round_up(call.num_rows, kSide) > 2 * kSide ? kPanelsPerTask : 1; }

int64_t num_panel_sets(const MatmulCall& call) { return (num_panels(call) + set_size(call) - 1) / set_size(call); }

int64_t num_tasks(const MatmulCall& call) {
    return num_panel_sets(call) * ((call.num_rows + kRowsInL2 - 1) / kRowsInL2);
}

void multiply(const MatmulCall& call, int64_t task) {
    const int64_t panels = num_panels(call), padded = round_up(call.num_rows, kSide);
    const int64_t size = set_size(call), panel_sets = num_panel_sets(call);
    const int64_t begin = task / panel_sets * kRowsInL2, first = task % panel_sets * size;
    const int64_t end = begin + kRowsInL2 < padded ? begin + kRowsInL2 : padded;
    const int64_t last = first + size < panels ? first + size : panels;
    // Static: on the stack, compilers may omit writing most of it, because they assume that only eight bytes are read.
    static constexpr AmxTileConfig shapes;
    _tile_loadconfig(&shapes);
    for (int64_t row = begin; row < end; row += 2 * kSide)
        for (int64_t panel = first; panel < last; ++panel)
            if (row + kSide < end)
                micro_kernel<2>(call, row, panel, row == begin);
            else
                micro_kernel<1>(call, row, panel, row == begin);
    _tile_release();
}

}  // namespace

// Requests permission to use tile registers from the operating system. Returns false without AMX or permission.
bool request_permission() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
           __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

extern const MatmulKernels matmul_bfloat16;
const MatmulKernels matmul_bfloat16 = {packed_bytes, scratch_bytes, pack,     num_converted_rows,
                                     convert_input_row,    num_tasks,     multiply, rows};

}  // namespace quire::amx
