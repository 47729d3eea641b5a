// Selects the build of the kernels for this processor, once, at first use.
#pragma once

#include "builds/kernels.hpp"

namespace quire {

// Returns the best build for this processor, or the build named by the environment variable QUIRE_INSTRUCTION_SET.
// Throws std::runtime_error if that name is unknown or not supported by this processor.
const Kernels& active_kernels();

// Whether matrix products with bf16 weights use AMX tile registers.
bool has_amx();
const MatmulKernels& active_matmul(WeightType type);

// Returns the build with this name; null if it was not compiled or this processor does not support it.
const Kernels* kernels_named(const char* isa);

}  // namespace quire
