// DotOperand codes of every output times four inputs of a row, added to a sum of 32 bits: one instruction where there is one.
// Exact everywhere, so all builds agree. Included only by files that are compiled once per instruction set.
//
//     kWordsPerGroup    32-bit words that hold a group's 32 inputs of a row
//     kCodeBias    what is taken from a code before it is multiplied, because the instruction wants signs
#pragma once

#include "common/simd.isa.hpp"

namespace quire::QUIRE_ISA {

typedef Lanes<kLanes>::I Sums;
typedef Lanes<kLanes>::U Words;

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr int kWordsPerGroup = 8, kCodeBias = 0;
struct DotOperand {
    Words codes;
};

QUIRE_INLINE DotOperand four(Words codes) { return {held(codes)}; }

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes.codes, _mm512_set1_epi32(*inputs));
#else
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes.codes, _mm256_set1_epi32(*inputs));
#endif
}

#elif defined(__AVX2__)

// Products of unsigned with signed bytes are added in pairs with saturation here: so by 16 bits, even and odd inputs.
constexpr int kWordsPerGroup = 16, kCodeBias = 0;
struct DotOperand {
    Words even, odd;
};

QUIRE_INLINE DotOperand four(Words codes) { return {held(codes & 0x00FF00FFu), held(codes >> 8 & 0x00FF00FFu)}; }

QUIRE_INLINE Sums by_pairs(Words codes, int32_t inputs) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
#else
    return (Sums)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
#endif
}

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    return sums + by_pairs(codes.even, inputs[0]) + by_pairs(codes.odd, inputs[1]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr int kWordsPerGroup = 8, kCodeBias = 128;
struct DotOperand {
    Words codes;
};

QUIRE_INLINE DotOperand four(Words codes) { return {codes ^ 0x80808080u}; }

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)codes.codes, vreinterpretq_s8_s32(vdupq_n_s32(*inputs)));
}

#else

constexpr int kWordsPerGroup = 8, kCodeBias = 0;
struct DotOperand {
    Sums each[4];
};

QUIRE_INLINE DotOperand four(Words codes) {
    return {{(Sums)(codes & 255u), (Sums)(codes >> 8 & 255u), (Sums)(codes >> 16 & 255u), (Sums)(codes >> 24)}};
}

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    int8_t input[4];
    __builtin_memcpy(input, inputs, 4);
    for (int j = 0; j < 4; ++j) sums = sums + codes.each[j] * int32_t{input[j]};
    return sums;
}

#endif

// Inputs of a group in the words that `dot` takes.
QUIRE_INLINE void store_inputs(const int8_t* inputs, int32_t* words) {
    if constexpr (kWordsPerGroup == 8) {
        __builtin_memcpy(words, inputs, 32);
    } else {
        for (int k = 0; k < 8; ++k)
            for (int odd = 0; odd < 2; ++odd) {
                const int16_t pair[2] = {inputs[4 * k + odd], inputs[4 * k + 2 + odd]};
                __builtin_memcpy(words + 2 * k + odd, pair, 4);
            }
    }
}

}  // namespace quire::QUIRE_ISA
