// Quantizes the inputs of a row to 8-bit integers in groups of 32: inputs = scale * integers, rounded to nearest, ties
// to even; scale = largest magnitude / 127. Equal bits on all builds. Included only by files compiled per instruction
// set.
#pragma once

#include "panels/int8_dot.isa.hpp"

namespace quire::QUIRE_ISA {

// Adding kMagicRound to a small float leaves the nearest integer in the low bits. An integer sum that starts from
// kMagicRoundBits has the bits of a float.
constexpr float kMagicRound = 12582912.0f;  // 1.5 * 2^23
constexpr int32_t kMagicRoundBits = 0x4B400000;

// Number of rows multiplied together; limited by the registers for their sums.
constexpr int kTileRows = kLanes == 16 ? 6 : kRegisters > 16 || kLanes == 8 ? 4 : 2;

// One group of kTileRows rows. The start value of each sum already has the offset of the codes subtracted.
struct RowGroup {
    int32_t inputs[kTileRows][kWordsPerGroup];
    int32_t begins[2][kTileRows];  // start values for inputs 0 to 15 and 16 to 31; with one scale, begins[0] for all
    float scales[kTileRows];
    float sums[kTileRows];  // minus the sum of the inputs, in float32
};

// The format's requirements: the code offset of start values, and inputs as bytes if byte products are added in pairs.
struct RowForm {
    int32_t offset;
    bool has_halves, has_bytes;
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

// Smaller inputs are treated as zero, because 127 / input would overflow.
constexpr float kSmallest = 0x1p-100f;

QUIRE_INLINE void quantise_group(const float* from, const RowForm& form, RowGroup& to, int row) {
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
    const float inverse = is_zero ? 0.0f : kLargestInput / largest;
    int8_t inputs[kGroupInputs];
    int32_t sums[2] = {0, 0};
    for (int v = 0; v < kVectors; ++v) {
        const F lifted = (is_zero ? F{} : numbers[v]) * inverse + kMagicRound;
        const Sums whole = (Sums)lifted - kMagicRoundBits;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(whole, Shorts), Bytes);
        __builtin_memcpy(inputs + v * kLanes, &bytes, sizeof bytes);
        sums[2 * v / kVectors] += sum_of_lanes<kLanes>(whole);
    }
    store_inputs(inputs, form.has_bytes, to.inputs[row]);
    const int32_t taken = form.offset - kCodeBias;
    const int32_t first = form.has_halves ? sums[0] : sums[0] + sums[1];
    to.begins[0][row] = kMagicRoundBits - taken * first;
    to.begins[1][row] = kMagicRoundBits - taken * sums[1];
    to.scales[row] = is_finite ? (is_zero ? 0.0f : largest / kLargestInput) : __builtin_nanf("");
    to.sums[row] = -(to.scales[row] * static_cast<float>(sums[0] + sums[1]));
}

}  // namespace quire::QUIRE_ISA
