// AMX tile registers: their availability, and the products that use them.
#pragma once

#include "builds/kernels.hpp"

namespace quire::amx {

bool allow();

extern const Products products_bfloat16;

}  // namespace quire::amx
