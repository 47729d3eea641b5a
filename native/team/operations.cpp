// Decides for each kernel whether its work is enough for several threads. See operations.hpp.
#include "team/operations.hpp"

#include "team/team.hpp"

namespace quire {
namespace {

// Minimum work for several threads: for less work, waking threads costs more than it saves.
// About 50 microseconds of elementwise work, or 5 of matrix products, for which threads are usually awake already.
constexpr int64_t kMinElements = 65536, kMinMultiplications = 1 << 19;

}  // namespace

void attention(const Kernels& kernels, const AttentionCall& call) {
    const bool is_large = call.num_slices * call.num_kv_heads > 1;
    run_team(is_large ? call.num_threads : 1, [&](TeamThread& thread) { kernels.attention(call, thread); });
}

void add_rms_norm(const Kernels& kernels, const NormCall& call, int num_threads) {
    run_team(call.num_rows * call.size >= kMinElements ? num_threads : 1, [&](TeamThread& thread) {
        thread.share(call.num_rows, [&](int64_t row) { kernels.norm_row(call, row); });
    });
}

void rope_write(const Kernels& kernels, const RopeCall& call, int num_threads) {
    // Each element of a key costs a cache miss, so several threads pay off for far fewer rows than with arithmetic.
    const int64_t misses = call.num_rows * call.num_kv_heads * call.key_size;
    run_team(misses >= kMinElements / 8 ? num_threads : 1, [&](TeamThread& thread) {
        thread.share(call.num_rows, [&](int64_t row) { kernels.rope_row(call, row); });
    });
}

void gate_mul(const Kernels& kernels, const GateCall& call, int num_threads) {
    run_team(call.num_rows * call.size >= kMinElements ? num_threads : 1, [&](TeamThread& thread) {
        thread.for_each_chunk(call.num_rows, call.size,
                    [&](int64_t row, int64_t first, int64_t end) { kernels.gate_part(call, row, first, end); });
    });
}

void argmax(const Kernels& kernels, const ArgmaxCall& call, int num_threads) {
    run_team(call.num_rows * call.size >= kMinElements ? num_threads : 1, [&](TeamThread& thread) {
        thread.share(call.num_rows, [&](int64_t row) { kernels.argmax_row(call, row); });
    });
}

void product(const MatmulKernels& kernels, const MatmulCall& call, int num_threads) {
    const bool is_large = call.num_rows * call.num_in * call.num_out >= kMinMultiplications;
    const int64_t num_converted = kernels.num_converted_rows(call);
    run_team(is_large ? num_threads : 1, [&](TeamThread& thread) {
        if (num_converted > 0)
            thread.for_each_chunk(num_converted, call.num_in, [&](int64_t row, int64_t first, int64_t end) {
                kernels.convert_input_row(call, row, first, end);
            });
        thread.share(kernels.num_tasks(call), [&](int64_t task) { kernels.multiply(call, task); });
    });
}

void panel_product(const Kernels& kernels, ComputeType arithmetic, const PanelCall& call, int num_threads) {
    const bool is_large = call.num_rows * call.shape.num_in * call.shape.num_out >= kMinMultiplications;
    run_team(is_large ? num_threads : 1, [&](TeamThread& thread) {
        const PanelKernels& panels = *kernels.panels;
        if (arithmetic == ComputeType::floating)
            return thread.share(panels.floating_tasks(call), [&](int64_t task) { panels.floating(call, task); });
        thread.for_each_chunk(call.num_rows, call.shape.num_in, [&](int64_t row, int64_t first, int64_t end) {
            panels.convert_input_row(call, row, first, end);
        });
        thread.share(panels.integer_tasks(call), [&](int64_t task) { panels.integer(call, task); });
    });
}

void panel_unpack(const Kernels& kernels, const UnpackCall& first, const Outputs& outputs, int num_threads) {
    const bool is_large = outputs.count * first.shape.num_in >= kMinElements;
    run_team(is_large ? num_threads : 1, [&](TeamThread& thread) {
        thread.share(outputs.count, [&](int64_t i) {
            kernels.panels->unpack({first.shape, first.packed, first.out + i * outputs.stride}, outputs.indices[i]);
        });
    });
}

}  // namespace quire
