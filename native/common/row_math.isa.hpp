// Functions of rows and of vectors that several kernels use. As in simd.isa.hpp, all definitions are in the namespace
// of the build, so that the linker keeps the copies of all builds.
#pragma once

#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;

// Adds vectors to four partial sums in turn, then adds the four partial sums, then the lanes of the result.
QUIRE_INLINE float sum_of_squares(const float* numbers, int64_t size) {
    F sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
            const F v = load<kLanes>(numbers + i + n * kLanes);
            sums[n] = fma_of(v, v, sums[n]);
        }
    for (int n = 0; i < size; i += kLanes, ++n) {
        const F v = i + kLanes <= size ? load<kLanes>(numbers + i) : load_part<kLanes>(numbers + i, size - i);
        sums[n] = fma_of(v, v, sums[n]);
    }
    return sum_lanes<kLanes>((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

QUIRE_INLINE float norm_factor(const float* numbers, int64_t size, float eps) {
    return 1.0f / __builtin_sqrtf(sum_of_squares(numbers, size) / static_cast<float>(size) + eps);
}

// 1 / (1 + e^-x), computed with e^-|x| to avoid overflow.
QUIRE_INLINE F sigmoid(F x) {
    const F e = exp_of<kLanes>(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : splat<kLanes>(1.0f)) / (1.0f + e);
}

}  // namespace
}  // namespace quire::QUIRE_ISA
