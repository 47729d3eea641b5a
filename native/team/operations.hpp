// Runs single kernels over all rows, each with a new team of threads: called from Python outside a decoder step.
#pragma once

#include "panels/panel_calls.hpp"

namespace quire {

void attention(const Kernels& kernels, const AttentionCall& call);
void add_rms_norm(const Kernels& kernels, const NormCall& call, int num_threads);
void rope_write(const Kernels& kernels, const RopeCall& call, int num_threads);
void gate_mul(const Kernels& kernels, const GateCall& call, int num_threads);
void argmax(const Kernels& kernels, const ArgmaxCall& call, int num_threads);
void product(const MatmulKernels& kernels, const MatmulCall& call, int num_threads);
void panel_product(const Kernels& kernels, ComputeType arithmetic, const PanelCall& call, int num_threads);

// Indices of the outputs (rows of the weight) to unpack, and the stride between unpacked rows.
struct Outputs {
    const int64_t* indices;
    int64_t count, stride;
};

void panel_unpack(const Kernels& kernels, const UnpackCall& first, const Outputs& outputs, int num_threads);

}  // namespace quire
