// Packs a weight, or some of its outputs, into panels.
#pragma once

#include "panels/format.hpp"

namespace quire {

// Scales and zero points, [output][scale], of formats with external scales.
struct ExternalScales {
    const float* scales;
    const uint8_t* zeros;
};

struct PanelPackCall {
    PanelShape shape;     // of the outputs that this call packs; a weight of several tensors needs several calls
    const uint8_t* rows;  // [output], in the layout of the file
    int64_t row_bytes;    // stride between outputs
    ExternalScales external;
    uint8_t* panels;      // aligned to a cache line
    int num_threads;
};

void pack_panels(const PanelPackCall& call);

}  // namespace quire
