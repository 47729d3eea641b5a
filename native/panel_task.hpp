// The frame of a product with panels, the same for both arithmetics: a thread leads a group of rows through a few
// neighbouring panels, some inputs at a time. What those inputs' weights are is decoded once, into the first-level
// cache; parts of the rows pass over it with their sums in registers, and leave the sums in a buffer for the next
// inputs. Sums are float32 there as in registers: where inputs are cut changes no bit.
#pragma once

#include <omp.h>

#include <cstddef>

#include "panel_products.hpp"
#include "shares.hpp"
#include "simd.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t kWorthThreads = 1 << 19;  // multiplications: some 5 microseconds

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows in equal parts: sixteen are six, six and four, and eight are four and four, not six and two.
QUIRE_INLINE int64_t rows_of_part(int64_t num_rows, int64_t most) {
    const int64_t parts = (num_rows + most - 1) / most;
    return parts == 0 ? 1 : (num_rows + parts - 1) / parts;
}

// Sums of a task [row][width] to where they belong, the bias added.
QUIRE_INLINE void put_sums(const PanelCall& call, int64_t row, int64_t count, int64_t output, const float* sums,
                           int64_t width) {
    const int64_t num_out = least(width, call.shape.num_out - output);
    for (int64_t r = 0; r < count; ++r) {
        float* out = call.out + (row + r) * call.out_stride + output;
        const float* from = sums + r * width;
        if (call.bias == nullptr)
            for (int64_t n = 0; n < num_out; ++n) out[n] = from[n];
        else
            for (int64_t n = 0; n < num_out; ++n) out[n] = from[n] + call.bias[output + n];
    }
}

}  // namespace quire::QUIRE_ISA
