// Products of rows with a packed weight: out = rows x weight^T + bias.
//
//     weight [out, in]  ->  [panel][in][kWidth]      a panel: kWidth consecutive outputs, zeros after the last output
//
// A task multiplies a few rows at a time with a panel, with sums in registers from the first input to the last. So a
// step reads each weight once, sequentially, and each sum is one chain in the order of inputs for any number of rows,
// panels and threads. One kernel and one copy of the weight serve any number of rows.
//
// bf16 weights are converted when they are loaded; rows and sums are float32.
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;

// Sums of kTileRows rows fill all registers except those for the vectors of one panel and one input.
constexpr int kVectors = kRegisters > 16 ? 3 : 2;
constexpr int kTileRows = kRegisters > 16 ? 9 : 6;
constexpr int kWidth = kVectors * kLanes;
constexpr int64_t kRowsInL2 = 32 * kTileRows;  // rows that fit in the L2 cache and are multiplied with all panels
constexpr int64_t kPrefetchBytes = 8192;           // prefetch distance, long enough that data has arrived when it is used

int64_t num_panels(int64_t num_out) { return (num_out + kWidth - 1) / kWidth; }

template <typename T>
int64_t packed_bytes(int64_t num_out, int64_t num_in) {
    return num_panels(num_out) * kWidth * num_in * static_cast<int64_t>(sizeof(T));
}

template <typename T>
void pack(const PackCall& call) {
    const int64_t panels = num_panels(call.num_out);
#pragma omp parallel for schedule(static) num_threads(call.num_threads)
    for (int64_t panel = 0; panel < panels; ++panel) {
        T* to = static_cast<T*>(call.packed) + panel * kWidth * call.num_in;
        for (int64_t i = 0; i < call.num_in; ++i)
            for (int64_t output = panel * kWidth; output < (panel + 1) * kWidth; ++output)
                put(to++, output < call.num_out ? call.weight[output * call.num_in + i] : 0.0f);
    }
}

// Multiplies R rows with a panel. Prefetches N vectors from `prefetch` on per input.
template <int R, int N, typename T>
void micro_kernel(const MatmulCall& call, int64_t row, int64_t panel, const T* prefetch) {
    const T* weights = static_cast<const T*>(call.packed) + panel * kWidth * call.num_in;
    const float* rows = call.rows + row * call.row_stride;
    F sums[R][kVectors] = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < call.num_in; ++i) {
        F weight[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) weight[v] = keep_in_register(load<kLanes>(weights + i * kWidth + v * kLanes));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) __builtin_prefetch(prefetch + (i * N + n) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const F input = splat<kLanes>(rows[r * call.row_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = fma_of(input, weight[v], sums[r][v]);
        }
    }
    const int64_t first = panel * kWidth;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        const int64_t output = first + v * kLanes, remaining = call.num_out - output;
        if (remaining <= 0) break;
        const int64_t count = remaining < kLanes ? remaining : kLanes;
        const F bias = call.bias == nullptr ? F{} : load_part<kLanes>(call.bias + output, count);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            float* out = call.out + (row + r) * call.out_stride + output;
            if (count == kLanes)
                store(out, sums[r][v] + bias);
            else
                store_part(out, sums[r][v] + bias, count);
        }
    }
}

template <int N, typename T>
void dispatch_rows(const MatmulCall& call, int64_t row, int64_t count, int64_t panel, const T* prefetch) {
    switch (count) {
        case 1: return micro_kernel<1, N>(call, row, panel, prefetch);
        case 2: return micro_kernel<2, N>(call, row, panel, prefetch);
        case 3: return micro_kernel<3, N>(call, row, panel, prefetch);
        case 4: return micro_kernel<4, N>(call, row, panel, prefetch);
        case 5: return micro_kernel<5, N>(call, row, panel, prefetch);
        case 6: return micro_kernel<6, N>(call, row, panel, prefetch);
    }
    if constexpr (kTileRows > 6) switch (count) {
        case 7: return micro_kernel<7, N>(call, row, panel, prefetch);
        case 8: return micro_kernel<8, N>(call, row, panel, prefetch);
        case 9: return micro_kernel<9, N>(call, row, panel, prefetch);
    }
}

// Multiplies all rows of a group with a panel, in nearly equal parts: sixteen rows as 8 + 8, not 9 + 7.
//
// Of several parts, only the first would wait for memory, so together they prefetch the next panel. A single part
// prefetches a fixed distance ahead.
template <typename T>
void multiply_row_block(const MatmulCall& call, int64_t begin, int64_t end, int64_t panel) {
    const int64_t num_parts = (end - begin + kTileRows - 1) / kTileRows, panel_size = kWidth * call.num_in;
    const T* weights = static_cast<const T*>(call.packed) + panel * panel_size;
    const int64_t vectors_per_part = (kVectors + num_parts - 1) / num_parts;
    for (int64_t part = 0, row = begin; part < num_parts; ++part) {
        const int64_t end_row = begin + (end - begin) * (part + 1) / num_parts;
        const T* prefetch = num_parts == 1 ? weights + kPrefetchBytes / static_cast<int64_t>(sizeof(T))
                                    : weights + panel_size + part * vectors_per_part * kLanes * call.num_in;
        const int64_t remaining = kVectors - part * vectors_per_part;
        switch (remaining < vectors_per_part ? remaining : vectors_per_part) {
            case 3: dispatch_rows<3>(call, row, end_row - row, panel, prefetch); break;
            case 2: dispatch_rows<2>(call, row, end_row - row, panel, prefetch); break;
            case 1: dispatch_rows<1>(call, row, end_row - row, panel, prefetch); break;
            default: dispatch_rows<0>(call, row, end_row - row, panel, prefetch);
        }
        row = end_row;
    }
}

int64_t num_groups(const MatmulCall& call) { return (call.num_rows + kRowsInL2 - 1) / kRowsInL2; }

int64_t num_tasks(const MatmulCall& call) { return num_panels(call.num_out) * num_groups(call); }

template <typename T>
void multiply(const MatmulCall& call, int64_t task) {
    const int64_t panels = num_panels(call.num_out), groups = num_groups(call), group = task / panels;
    multiply_row_block<T>(call, call.num_rows * group / groups, call.num_rows * (group + 1) / groups, task % panels);
}

float to_float(float weight) { return weight; }

float to_float(bf16 weight) {
    const uint32_t bits = static_cast<uint32_t>(weight) << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
void rows(const GatherCall& call) {
    for (int64_t row = 0; row < call.num_rows; ++row) {
        const int64_t panel = call.indices[row] / kWidth, lane = call.indices[row] % kWidth;
        const T* from = static_cast<const T*>(call.packed) + panel * kWidth * call.num_in + lane;
        for (int64_t i = 0; i < call.num_in; ++i) call.out[row * call.num_in + i] = to_float(from[i * kWidth]);
    }
}

int64_t no_scratch(int64_t, int64_t) { return 0; }
int64_t no_converted_rows(const MatmulCall&) { return 0; }
void convert_nothing(const MatmulCall&, int64_t, int64_t, int64_t) {}

template <typename T>
constexpr MatmulKernels matmul_of = {packed_bytes<T>, no_scratch, pack<T>,     no_converted_rows,
                                  convert_nothing, num_tasks,  multiply<T>, rows<T>};

}  // namespace

extern const MatmulKernels matmul_float32, matmul_bfloat16;
const MatmulKernels matmul_float32 = matmul_of<float>;
const MatmulKernels matmul_bfloat16 = matmul_of<bf16>;

}  // namespace quire::QUIRE_ISA
