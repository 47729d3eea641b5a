// Which build of the kernels runs here. Decided once, at first use.
#pragma once

#include "builds/kernels.hpp"

namespace quire {

// The best build this processor runs. The environment variable QUIRE_NATIVE names a lesser one, for tests; a name that
// is unknown or that this processor cannot run throws std::runtime_error.
const Kernels& chosen_kernels();

// Whether bf16 weights are multiplied in tile registers.
bool has_amx();
const Products& chosen_products(WeightType type);

// The build of that name, or null: not built, or not for this processor.
const Kernels* kernels_named(const char* isa);

}  // namespace quire
