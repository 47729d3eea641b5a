// A row's inputs as integers of eight bits, by groups of 32: inputs = scale * integers, to the nearest, ties to even,
// with scale = the largest size / 127. The same bits on every build. Included only by files that are compiled once per
// instruction set.
#pragma once

#include "panels/int8_dot.isa.hpp"
#include "panels/format.hpp"

namespace quire::QUIRE_ISA {

// Adding it to a small number leaves the nearest integer in the low bits; a sum that begins with its bits is a float.
constexpr float kMagicRound = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t kMagicRoundBits = 0x4B400000;

// Rows that pass over weights together: what their sums fill of the registers.
constexpr int kTileRows = kLanes == 16 ? 6 : kRegisters > 16 || kLanes == 8 ? 4 : 2;

// One group of kTileRows rows. A sum begins where the code's offset has been taken away from it.
struct RowGroup {
    int32_t inputs[kTileRows][kWordsPerGroup];
    int32_t begins[2][kTileRows];  // for inputs 0 to 15 and 16 to 31, or the first for all
    float scales[kTileRows];
    float sums[kTileRows];  // minus the sum of the inputs, in float32
};

// How a format wants its sums begun.
struct AccumulatorInit {
    int32_t offset;
    bool has_halves;
};

template <int N, typename V>
QUIRE_INLINE auto largest_lane(V v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        typedef typename Lanes<N / 2>::U Half;
        Half low, high;
        __builtin_memcpy(&low, &v, sizeof low);
        __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return largest_lane<N / 2>(low > high ? low : high);
    }
}

template <int N, typename V>
QUIRE_INLINE int32_t sum_of_lanes(V v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        typedef typename Lanes<N / 2>::I Half;
        Half low, high;
        __builtin_memcpy(&low, &v, sizeof low);
        __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return sum_of_lanes<N / 2>(low + high);
    }
}

// Numbers this small are zero: 127 over them would be no number.
constexpr float kSmallest = 0x1p-100f;

QUIRE_INLINE void quantise_group(const float* from, const AccumulatorInit& beginning, RowGroup& to, int row) {
    typedef Lanes<kLanes>::F F;
    typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    constexpr int kVectors = kGroupInputs / kLanes;
    F numbers[kVectors];
    Words sizes = {};
    for (int v = 0; v < kVectors; ++v) {
        numbers[v] = load<kLanes>(from + v * kLanes);
        const Words size = (Words)numbers[v] & 0x7FFFFFFFu;
        sizes = size > sizes ? size : sizes;
    }
    const uint32_t largest_bits = largest_lane<kLanes>(sizes);
    float largest;
    __builtin_memcpy(&largest, &largest_bits, 4);
    const bool is_finite = largest_bits < 0x7F800000u, is_zero = !is_finite || largest < kSmallest;
    const float inverse = is_zero ? 0.0f : 127.0f / largest;
    int8_t inputs[kGroupInputs];
    int32_t sums[2] = {0, 0};
    for (int v = 0; v < kVectors; ++v) {
        const F lifted = (is_zero ? F{} : numbers[v]) * inverse + kMagicRound;
        const Sums whole = (Sums)lifted - kMagicRoundBits;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Shorts), Bytes);
        __builtin_memcpy(inputs + v * kLanes, &bytes, sizeof bytes);
        sums[2 * v / kVectors] += sum_of_lanes<kLanes>(whole);
    }
    store_inputs(inputs, to.inputs[row]);
    const int32_t taken = beginning.offset - kCodeBias;
    const int32_t first = beginning.has_halves ? sums[0] : sums[0] + sums[1];
    to.begins[0][row] = kMagicRoundBits - taken * first;
    to.begins[1][row] = kMagicRoundBits - taken * sums[1];
    to.scales[row] = is_finite ? (is_zero ? 0.0f : largest / 127.0f) : __builtin_nanf("");
    to.sums[row] = -(to.scales[row] * static_cast<float>(sums[0] + sums[1]));
}

}  // namespace quire::QUIRE_ISA
