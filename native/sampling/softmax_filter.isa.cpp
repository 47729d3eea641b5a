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
constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;  // n times the first is exact
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
    for (int at = kDegree - 1; at >= 0; --at) p = p * r + kInverseFactorials[at];
    uint64_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof bits);
    // Multiplies by two powers of two, because the smallest results are subnormal.
    const uint64_t whole = bits - kRoundBits + 2048, half = whole >> 1;
    const double y = p * power_of_two(half - 1024) * power_of_two(whole - half - 1024);
    return x < kUnderflow ? 0.0 : y;
}

template <typename Number>
void heat(const Number* __restrict in, const SoftmaxCall& call) {
    double* __restrict heated = call.heated;
    double* __restrict out = call.out;
    const double peak = call.peak, temperature = call.temperature;
    if (!heated)
        for (int64_t at = 0; at < call.in.size; ++at)
            out[at] = exp_of((static_cast<double>(in[at]) - peak) / temperature);
    else
        for (int64_t at = 0; at < call.in.size; ++at) {
            const double below = (static_cast<double>(in[at]) - peak) / temperature;
            heated[at] = below;
            out[at] = exp_of(below);
        }
}

// Returns the maximum, or NaN if any value is NaN.
template <typename Number>
double largest_of(const Number* in, int64_t size) {
    Number lanes[kLanes];
    Number strange[kLanes] = {};  // per lane the last NaN, or 0
    std::fill(lanes, lanes + kLanes, -std::numeric_limits<Number>::infinity());
    const int64_t even = size - size % kLanes;
    for (int64_t at = 0; at < even; at += kLanes)
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            const Number value = in[at + lane];
            lanes[lane] = value > lanes[lane] ? value : lanes[lane];
            strange[lane] = value == value ? strange[lane] : value;
        }
    for (int64_t at = even; at < size; ++at) {
        lanes[0] = in[at] > lanes[0] ? in[at] : lanes[0];
        strange[0] = in[at] == in[at] ? strange[0] : in[at];
    }
    double found = static_cast<double>(*std::max_element(lanes, lanes + kLanes));
    for (const Number one : strange) found += static_cast<double>(one);
    return found;
}

}  // namespace

void exp_double(const double* in, double* out, int64_t size) {
    for (int64_t at = 0; at < size; ++at) out[at] = exp_of(in[at]);
}

void exp_scaled(const SoftmaxCall& call) {
    call.in.wide ? heat(call.in.wide, call) : heat(call.in.narrow, call);
}

double largest(const LogitRow& in) { return in.wide ? largest_of(in.wide, in.size) : largest_of(in.narrow, in.size); }

// Without a branch per value, because selected values follow no pattern. In most rows many blocks have none.
int64_t pick(const FilterCall& call) {
    int64_t count = 0, first = 0;
    for (; first + kLanes <= call.size; first += kLanes) {
        int64_t num_found = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) num_found += call.in[first + lane] >= call.least;
        for (int64_t lane = 0; lane < kLanes && num_found; ++lane) {
            call.picked[count] = call.in[first + lane];
            call.places[count] = first + lane;
            count += call.in[first + lane] >= call.least;
        }
    }
    for (; first < call.size; ++first)
        if (call.in[first] >= call.least) call.picked[count] = call.in[first], call.places[count++] = first;
    return count;
}

}  // namespace quire::QUIRE_ISA
