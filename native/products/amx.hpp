// AMX tile registers: their availability, and the products that use them.
#pragma once

#include "builds/kernels.hpp"

namespace quire::amx {

bool request_permission();

extern const MatmulKernels matmul_bfloat16;

}  // namespace quire::amx
