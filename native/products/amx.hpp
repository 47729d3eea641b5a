// Tile registers: whether there are any here, and the products made in them.
#pragma once

#include "builds/kernels.hpp"

namespace quire::amx {

bool allow();

extern const Products products_bfloat16;

}  // namespace quire::amx
