// Code shared by float and integer products with panels: blocks of 16 weight columns (format.hpp). A task multiplies a
// group of rows with a few consecutive panels, one range of inputs at a time. It decodes the weights of a range once
// into the cache and multiplies one part of the rows after another, with sums in registers. After each range, the sums
// are stored in a float32 buffer, from which the next range continues; so the division into ranges changes no bits.
#pragma once

#include <cstddef>

#include "panels/panel_calls.hpp"
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Offsets in the panels of a call, computed once.
struct PanelLayout {
    const uint8_t* packed;
    int64_t num_panels, panel_bytes, codes_offset, group_bytes;

    explicit QUIRE_INLINE PanelLayout(const PanelCall& call)
        : packed(call.packed), num_panels(call.shape.num_panels()),
          panel_bytes(call.shape.panel_bytes()),
          codes_offset(call.shape.codes_offset()),
          group_bytes(call.shape.group_bytes()) {}

    // After the last panel, returns the last panel again; its results are not read.
    QUIRE_INLINE const uint8_t* panel(int64_t i) const { return packed + min_of(i, num_panels - 1)
                                                            * panel_bytes; }

    // The codes of a panel from `input` on; `input` must be the first of a group.
    QUIRE_INLINE const uint8_t* codes(int64_t index, int64_t input) const {
        return panel(index) + codes_offset + input * group_bytes / kGroupInputs;
    }

    // The address `num_bytes` after codes(index, input), to prefetch. After the end of a panel, the corresponding panel
    // of the next set of `set_size` panels follows, beginning with its scales.
    QUIRE_INLINE const uint8_t* codes_after(int64_t index, int64_t input, int64_t num_bytes, int64_t set_size) const {
        const int64_t offset = codes_offset + input * group_bytes / kGroupInputs + num_bytes;
        return panel(index) + offset + (offset < panel_bytes ? 0 : (set_size - 1) * panel_bytes);
    }
};

// Rows per part, if rows are divided into nearly equal parts of at most `max_rows`: with 6, eight rows are 4 + 4.
QUIRE_INLINE int64_t rows_per_part(int64_t num_rows, int64_t max_rows) {
    const int64_t num_parts = (num_rows + max_rows - 1) / max_rows;
    return num_parts == 0 ? 1 : (num_rows + num_parts - 1) / num_parts;
}

// Writes the sums [row][width] of a task plus the bias to the outputs from `first_output` on.
QUIRE_INLINE void write_sums(const PanelCall& call, int64_t row, int64_t count, int64_t first_output, const float* sums,
                           int64_t width) {
    const int64_t num_out = min_of(width, call.shape.num_out - first_output);
    for (int64_t r = 0; r < count; ++r) {
        float* out = call.out + (row + r) * call.out_stride + first_output;
        const float* row_sums = sums + r * width;
        if (call.bias == nullptr)
            for (int64_t n = 0; n < num_out; ++n) out[n] = row_sums[n];
        else
            for (int64_t n = 0; n < num_out; ++n) out[n] = row_sums[n] + call.bias[first_output + n];
    }
}

}  // namespace quire::QUIRE_ISA
