// Decodes panels for kernels: codes to one unsigned byte each, in the order of dot products, and scales to float32. So
// only decoders depend on formats, not kernels.
#pragma once

#include "panels/format.hpp"
#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

// The codes of a group (32 inputs) of a panel, one byte each.
struct alignas(64) GroupCodes {
    uint8_t bytes[8][64];
};

// The scales of a group. scales[1] is for inputs 16 to 31 if the format has separate scales for them, else not written.
struct alignas(64) GroupScales {
    float scales[2][kWidth];
    float term[kWidth];  // the minimum or the zero point
};

// A range of groups of a panel.
struct GroupRange {
    const PanelShape& shape;
    const uint8_t* panel;
    int64_t first, count;
};

struct Dequantizer {
    void (*codes)(const GroupRange& span, GroupCodes* to);    // null for dense formats
    void (*scales)(const GroupRange& span, GroupScales* to);  // null for dense formats
    // Decodes to float32, [input][16]. The range counts inputs; for coded formats it must be whole groups.
    void (*widen)(const GroupRange& inputs, float* to);
};

const Dequantizer& decoder_of(Format format);

}  // namespace quire::QUIRE_ISA
