// e^x in double precision for x <= 0, for sampling and log-probabilities. Uses only unfused multiplications and
// additions, so that all builds, and numpy with the same operations (backends/host/exponential.py), return the same
// bits.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "builds/kernels.hpp"

namespace quire::QUIRE_ISA {
namespace {

constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the nearest integer in the low bits
constexpr uint64_t kRoundBits = 0x4338000000000000;
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;  // n * kLn2High is exact
constexpr double kUnderflow = -746.0;  // below it e^x is 0 in any rounding
constexpr int64_t kLanes = 16;
constexpr int kDegree = 13;        // degree of the Taylor polynomial: its error is below half a unit in the last place
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
    for (int i = kDegree - 1; i >= 0; --i) p = p * r + kInverseFactorials[i];
    uint64_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    // Multiplies by two powers of two, because the smallest results are subnormal.
    const uint64_t exponent_bits = bits - kRoundBits + 2048, half_bits = exponent_bits >> 1;
    const double y = p * power_of_two(half_bits - 1024) * power_of_two(exponent_bits - half_bits - 1024);
    return x < kUnderflow ? 0.0 : y;
}

template <typename Number>
void scale_and_exp(const Number* __restrict in, const SoftmaxCall& call) {
    double* __restrict exponents = call.exponents;
    double* __restrict out = call.out;
    const double peak = call.peak, temperature = call.temperature;
    if (!exponents)
        for (int64_t i = 0; i < call.in.size; ++i)
            out[i] = exp_of((static_cast<double>(in[i]) - peak) / temperature);
    else
        for (int64_t i = 0; i < call.in.size; ++i) {
            const double exponent = (static_cast<double>(in[i]) - peak) / temperature;
            exponents[i] = exponent;
            out[i] = exp_of(exponent);
        }
}

// Returns the maximum, or NaN if any value is NaN.
template <typename Number>
double max_of(const Number* in, int64_t size) {
    Number lanes[kLanes];
    Number nans[kLanes] = {};  // per lane the last NaN, or 0
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<Number>::infinity());
    const int64_t num_full = size - size % kLanes;
    for (int64_t i = 0; i < num_full; i += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Number value = in[i + lane];
            lanes[lane] = value > lanes[lane] ? value : lanes[lane];
            nans[lane] = value == value ? nans[lane] : value;
        }
    for (int64_t i = num_full; i < size; ++i) {
        lanes[0] = in[i] > lanes[0] ? in[i] : lanes[0];
        nans[0] = in[i] == in[i] ? nans[0] : in[i];
    }
    double max_value = static_cast<double>(*std::max_element(lanes, lanes + kLanes));
    for (const Number nan : nans) max_value += static_cast<double>(nan);
    return max_value;
}

}  // namespace

void exp_double(const double* in, double* out, int64_t size) {
    for (int64_t i = 0; i < size; ++i) out[i] = exp_of(in[i]);
}

void exp_scaled(const SoftmaxCall& call) {
    call.in.doubles ? scale_and_exp(call.in.doubles, call) : scale_and_exp(call.in.floats, call);
}

double max_logit(const LogitRow& in) { return in.doubles ? max_of(in.doubles, in.size) : max_of(in.floats, in.size); }

// Has no branch per value, because selected values follow no pattern. Most blocks of kLanes values have none.
int64_t filter(const FilterCall& call) {
    int64_t count = 0, first = 0;
    for (; first + kLanes <= call.size; first += kLanes) {
        int64_t num_selected = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) num_selected += call.in[first + lane] >= call.minimum;
        for (int64_t lane = 0; lane < kLanes && num_selected; ++lane) {
            call.values[count] = call.in[first + lane];
            call.indices[count] = first + lane;
            count += call.in[first + lane] >= call.minimum;
        }
    }
    for (; first < call.size; ++first)
        if (call.in[first] >= call.minimum) call.values[count] = call.in[first], call.indices[count++] = first;
    return count;
}

}  // namespace quire::QUIRE_ISA
