// Products with weights in panels: the arguments of calls, and the function table of a build.
#pragma once

#include "panels/format.hpp"

namespace quire {

// The arithmetic of products. Floating: weights are converted to float32, and products are added one by one in the
// order of inputs. Integer: the inputs of a row are quantized to eight bits in groups of 32, the sum of a group is
// exact, and groups are added in float32 in their order; all builds return the same bits.
enum class ComputeType : int { floating = 0, integer = 1 };

struct PanelCall {
    PanelShape shape;
    const uint8_t* packed;
    const float* rows;  // [row, in]
    int64_t row_stride;
    const float* bias;  // [out], or null
    float* out;         // [row, out]
    int64_t out_stride;
    int64_t num_rows;
    char* scratch;  // scratch_bytes, aligned to 64
};

struct UnpackCall {
    PanelShape shape;
    const uint8_t* packed;
    float* out;  // [in]
};

// Like MatmulKernels (kernels.hpp); rows are converted only for integer arithmetic.
struct PanelKernels {
    int64_t (*floating_tasks)(const PanelCall&);
    void (*floating)(const PanelCall&, int64_t task);
    int64_t (*integer_tasks)(const PanelCall&);
    void (*integer)(const PanelCall&, int64_t task);
    int64_t (*scratch_bytes)(ComputeType arithmetic, int64_t num_rows, int64_t num_in);
    void (*convert_input_row)(const PanelCall&, int64_t row, int64_t first, int64_t end);
    void (*unpack)(const UnpackCall&, int64_t output);
};

}  // namespace quire
