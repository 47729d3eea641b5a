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
    int32_t starts[2][kTileRows];  // start values for inputs 0 to 15 and 16 to 31; with one scale, begins[0] for all
    float scales[kTileRows];
    float sums[kTileRows];  // minus the sum of the inputs, in float32
};

// What a format needs of the inputs: the code offset, separate sums of both halves, inputs as bytes (see store_inputs).
struct InputForm {
    int32_t offset;
    bool has_halves, has_bytes;
};

template <int N, typename V>
QUIRE_INLINE auto max_lane(V v) {
    if constexpr (N == 1) {
        return v[0];
    } else {
        typedef typename Lanes<N / 2>::U Half;
        Half low, high;
        __builtin_memcpy(&low, &v, sizeof low);
        __builtin_memcpy(&high, reinterpret_cast<const char*>(&v) + sizeof low, sizeof high);
        return max_lane<N / 2>(low > high ? low : high);
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
constexpr float kMinMagnitude = 0x1p-100f;

QUIRE_INLINE void quantise_group(const float* from, const InputForm& format, RowGroup& to, int row) {
    typedef Lanes<kLanes>::F F;
    typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
    typedef int8_t Bytes __attribute__((vector_size(kLanes)));
    constexpr int kVectors = kGroupInputs / kLanes;
    F numbers[kVectors];
    Words magnitudes = {};
    for (int v = 0; v < kVectors; ++v) {
        numbers[v] = load<kLanes>(from + v * kLanes);
        const Words magnitude = (Words)numbers[v] & 0x7FFFFFFFu;
        magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
    }
    const uint32_t max_bits = max_lane<kLanes>(magnitudes);
    float max_magnitude;
    __builtin_memcpy(&max_magnitude, &max_bits, 4);
    const bool is_finite = max_bits < 0x7F800000u, is_zero = !is_finite || max_magnitude < kMinMagnitude;
    const float inverse = is_zero ? 0.0f : kLargestInput / max_magnitude;
    int8_t inputs[kGroupInputs];
    int32_t sums[2] = {0, 0};
    for (int v = 0; v < kVectors; ++v) {
        const F shifted = (is_zero ? F{} : numbers[v]) * inverse + kMagicRound;
        const Sums integers = (Sums)shifted - kMagicRoundBits;
        const Bytes bytes = __builtin_convertvector(__builtin_convertvector(integers, Shorts), Bytes);
        __builtin_memcpy(inputs + v * kLanes, &bytes, sizeof bytes);
        sums[2 * v / kVectors] += sum_of_lanes<kLanes>(integers);
    }
    store_inputs(inputs, format.has_bytes, to.inputs[row]);
    const int32_t offset = format.offset - kCodeBias;
    const int32_t first_sum = format.has_halves ? sums[0] : sums[0] + sums[1];
    to.starts[0][row] = kMagicRoundBits - offset * first_sum;
    to.starts[1][row] = kMagicRoundBits - offset * sums[1];
    to.scales[row] = is_finite ? (is_zero ? 0.0f : max_magnitude / kLargestInput) : __builtin_nanf("");
    to.sums[row] = -(to.scales[row] * static_cast<float>(sums[0] + sums[1]));
}

}  // namespace quire::QUIRE_ISA
