// What a panel says, in the form that kernels read: codes without signs, a byte each, in the order of dot products, and
// scales in float32. So a format is known to its decoder alone, and kernels know no formats.
#pragma once

#include "panels/format.hpp"
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

// The codes of 32 inputs of a panel, a byte each.
struct alignas(64) GroupCodes {
    uint8_t bytes[8][64];
};

// Their scales. The second is that of inputs 16 to 31, where they have their own: else it is not written.
struct alignas(64) GroupScales {
    float scales[2][kWidth];
    float term[kWidth];  // the minimum, or what stands for zero
};

// Groups of a panel from `first` on; of super-blocks, whole ones or the first groups of one.
struct GroupRange {
    const PanelShape& shape;
    const uint8_t* panel;
    int64_t first, count;
};

struct Dequantizer {
    void (*codes)(const GroupRange& span, GroupCodes* to);    // null: dense
    void (*scales)(const GroupRange& span, GroupScales* to);  // null: dense
    // Inputs, not groups, as float32, [input][16]. Of a coded format, whole groups.
    void (*widen)(const GroupRange& inputs, float* to);
};

const Dequantizer& decoder_of(Format format);

}  // namespace quire::QUIRE_ISA
