// Packing a weight, or some outputs of one, into panels.
#pragma once

#include "panels/format.hpp"

namespace quire {

// What comes beside the codes of a format whose scales are given: [output][scale].
struct ExternalScales {
    const float* scales;
    const uint8_t* zeros;
};

struct PanelPackCall {
    PanelShape shape;     // of what is packed now; a weight of several is packed by several calls
    const uint8_t* rows;  // [output], as the file has them
    int64_t row_bytes;    // from one output to the next
    ExternalScales external;
    uint8_t* panels;      // beginning a cache line
    int num_threads;
};

void pack_panels(const PanelPackCall& call);

}  // namespace quire
