// Code shared by float and integer products with panels. A task multiplies a group of rows with a few consecutive
// panels, for a range of inputs at a time. The weights of this range are decoded once into the L1 cache. Parts of the
// rows are multiplied with them, with sums in registers, which are then stored in a buffer for the next range of
// inputs. Sums are float32 in the buffer too, so the division into ranges changes no bits.
#pragma once

#include <cstddef>

#include "panels/panel_calls.hpp"
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Offsets in the panels of a call, computed once.
struct PanelLayout {
    const uint8_t* packed;
    int64_t num_panels, panel_bytes, codes_at, group_bytes;

    explicit QUIRE_INLINE PanelLayout(const PanelCall& call)
        : packed(call.packed),
          num_panels(call.shape.num_panels()),
          panel_bytes(call.shape.panel_bytes()),
          codes_at(call.shape.codes_at()),
          group_bytes(call.shape.group_bytes()) {}

    // After the last panel, returns the last panel again; its results are not read.
    QUIRE_INLINE const uint8_t* panel(int64_t at) const { return packed + least(at, num_panels - 1) * panel_bytes; }

    // The codes of a panel from `input` on, which is the first of a group.
    QUIRE_INLINE const uint8_t* codes(int64_t at, int64_t input) const {
        return panel(at) + codes_at + input * group_bytes / kGroupInputs;
    }

    // The address that a thread reads `num_bytes` after these codes, for prefetching. After the end of a panel, this is
    // the corresponding panel of the next set of `together` panels, beginning with its scales.
    QUIRE_INLINE const uint8_t* ahead(int64_t at, int64_t input, int64_t num_bytes, int64_t together) const {
        const int64_t place = codes_at + input * group_bytes / kGroupInputs + num_bytes;
        return panel(at) + place + (place < panel_bytes ? 0 : (together - 1) * panel_bytes);
    }
};

// Divides rows into nearly equal parts of at most `most` rows: eight rows are four and four, not six and two.
QUIRE_INLINE int64_t rows_of_part(int64_t num_rows, int64_t most) {
    const int64_t parts = (num_rows + most - 1) / most;
    return parts == 0 ? 1 : (num_rows + parts - 1) / parts;
}

// Adds the bias to the sums [row][width] of a task and writes them to the output.
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
