// e^x in double precision for x <= 0: what sampling and log-probabilities are made of. Written in multiplications and
// additions alone, none of them fused, so that every build, and numpy doing the same operations (backends/host/
// exponential.py), has the same bits.
#include <cstdint>

#include "kernels.hpp"

namespace quire::QUIRE_ISA {
namespace {

constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer in the low bits
constexpr uint64_t kRoundBits = 0x4338000000000000;
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;  // n times the first is exact
constexpr double kLeast = -746.0;  // below it e^x is 0 in any rounding
constexpr int kDegree = 13;        // of the Taylor series: what is left out is below half a unit in the last place
constexpr double kInverseFactorials[kDegree + 1] = {
    1.0,       1.0,        1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
    1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};

inline double power_of_two(uint64_t exponent) {
    const uint64_t bits = (exponent + 1023) << 52;
    double power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return power;
}

inline double exp_of(double x) {
    const double shifted = x * kLog2E + kRound, n = shifted - kRound;
    const double r = (x - n * kLn2High) - n * kLn2Low;
    double p = kInverseFactorials[kDegree];
#pragma GCC unroll 16
    for (int at = kDegree - 1; at >= 0; --at) p = p * r + kInverseFactorials[at];
    uint64_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    // In two halves: the smallest results have an exponent that no normal number has.
    const uint64_t whole = bits - kRoundBits + 2048, half = whole >> 1;
    const double y = p * power_of_two(half - 1024) * power_of_two(whole - half - 1024);
    return x < kLeast ? 0.0 : y;
}

}  // namespace

void exp_double(const double* in, double* out, int64_t size) {
    for (int64_t at = 0; at < size; ++at) out[at] = exp_of(in[at]);
}

}  // namespace quire::QUIRE_ISA
