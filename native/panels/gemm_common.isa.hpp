// The frame of a product with panels, the same for both arithmetics: a thread leads a group of rows through a few
// neighbouring panels, some inputs at a time. What those inputs' weights are is decoded once, into the first-level
// cache; parts of the rows pass over it with their sums in registers, and leave the sums in a buffer for the next
// inputs. Sums are float32 there as in registers: where inputs are cut changes no bit.
#pragma once

#include <cstddef>

#include "panels/panel_calls.hpp"
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Where things are in a call's panels, reckoned once.
struct PanelLayout {
    const uint8_t* packed;
    int64_t num_panels, panel_bytes, codes_at, group_bytes;

    explicit QUIRE_INLINE PanelLayout(const PanelCall& call)
        : packed(call.packed),
          num_panels(call.shape.num_panels()),
          panel_bytes(call.shape.panel_bytes()),
          codes_at(call.shape.codes_at()),
          group_bytes(call.shape.group_bytes()) {}

    // Behind the last panel it is the last once more: its results are not read.
    QUIRE_INLINE const uint8_t* panel(int64_t at) const { return packed + least(at, num_panels - 1) * panel_bytes; }

    // Of codes by groups, from a group on.
    QUIRE_INLINE const uint8_t* codes(int64_t at, int64_t input) const {
        return panel(at) + codes_at + input * group_bytes / kGroupInputs;
    }

    // What a thread will read so many bytes after these codes: behind a panel's end, the panel after those that pass
    // together, scales first.
    QUIRE_INLINE const uint8_t* ahead(int64_t at, int64_t input, int64_t num_bytes, int64_t together) const {
        const int64_t place = codes_at + input * group_bytes / kGroupInputs + num_bytes;
        return panel(at) + place + (place < panel_bytes ? 0 : (together - 1) * panel_bytes);
    }
};

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
