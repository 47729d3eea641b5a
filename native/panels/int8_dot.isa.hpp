// Dot products of four codes per output with four inputs of a row, added to 32-bit sums; one instruction if the CPU has
// one. Exact on all builds, so all builds return the same bits. Included only by files compiled per instruction set.
//
//     kWordsPerGroup    32-bit words per group (32 inputs) of a row
//     kCodeBias    subtracted from codes before multiplication, for instructions with signed operands
//     kHasPairs    pairs of byte products are added in 16 bits with saturation, so only for small codes
#pragma once

#include "common/simd.isa.hpp"
#include "panels/format.hpp"

namespace quire::QUIRE_ISA {

typedef Lanes<kLanes>::I Sums;
typedef Lanes<kLanes>::U Words;
struct PairMath;  // defined if kHasPairs

constexpr int kLargestInput = 127;  // rows are quantized to -127 .. 127

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

constexpr bool kHasPairs = false;
constexpr int kWordsPerGroup = 8, kCodeBias = 0;
struct DotOperand {
    Words codes;
};

QUIRE_INLINE DotOperand make_operand(Words codes) { return {keep_in_register(codes)}; }

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
#if defined(__AVX512VNNI__)
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes.codes, _mm512_set1_epi32(*inputs));
#else
    return (Sums)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes.codes, _mm256_set1_epi32(*inputs));
#endif
}

#elif defined(__AVX2__)

// maddubs multiplies unsigned with signed bytes and adds pairs of products with saturation. If codes are small, several
// pairs can be added before the sum exceeds 16 bits:
//
//     codes up to  largest pair     pairs within 32,767
//     15           3,810            8, a whole group
//     31           7,874            4
//     63           16,002           2
//     255          64,770           0: multiply in 16 bits, even and odd inputs separately
constexpr bool kHasPairs = true;
constexpr int kWordsPerGroup = 16, kCodeBias = 0;

struct PairMath {
    typedef int16_t Pairs __attribute__((vector_size(4 * kLanes)));

    static QUIRE_INLINE Pairs products(Words codes, int32_t inputs) {
#if defined(__AVX512BW__)
        return (Pairs)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
#else
        return (Pairs)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
#endif
    }

    static QUIRE_INLINE Sums widen(Pairs pairs) {
#if defined(__AVX512BW__)
        return (Sums)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
        return (Sums)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
    }
};

struct DotOperand {
    Words even, odd;
};

QUIRE_INLINE DotOperand make_operand(Words codes) { return {keep_in_register(codes & 0x00FF00FFu), keep_in_register(codes >> 8 & 0x00FF00FFu)}; }

QUIRE_INLINE Sums dot_pairs(Words codes, int32_t inputs) {
#if defined(__AVX512BW__)
    return (Sums)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(inputs));
#else
    return (Sums)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(inputs));
#endif
}

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    return sums + dot_pairs(codes.even, inputs[0]) + dot_pairs(codes.odd, inputs[1]);
}

#elif defined(__ARM_FEATURE_DOTPROD)

constexpr bool kHasPairs = false;
constexpr int kWordsPerGroup = 8, kCodeBias = 128;
struct DotOperand {
    Words codes;
};

QUIRE_INLINE DotOperand make_operand(Words codes) { return {codes ^ 0x80808080u}; }

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    return (Sums)vdotq_s32((int32x4_t)sums, (int8x16_t)codes.codes, vreinterpretq_s8_s32(vdupq_n_s32(*inputs)));
}

#else

constexpr bool kHasPairs = false;
constexpr int kWordsPerGroup = 8, kCodeBias = 0;
struct DotOperand {
    Sums codes[4];
};

QUIRE_INLINE DotOperand make_operand(Words codes) {
    return {{(Sums)(codes & 255u), (Sums)(codes >> 8 & 255u), (Sums)(codes >> 16 & 255u), (Sums)(codes >> 24)}};
}

QUIRE_INLINE Sums dot(Sums sums, const DotOperand& codes, const int32_t* inputs) {
    int8_t input[4];
    __builtin_memcpy(input, inputs, 4);
    for (int j = 0; j < 4; ++j) sums = sums + codes.codes[j] * int32_t{input[j]};
    return sums;
}

#endif

// The number of vectors of product pairs that a format adds in 16 bits (a group has 8); 0: `dot` is used.
constexpr int pair_limit(Format format) {
    if (!kHasPairs) return 0;
    const int max_pairs = INT16_MAX / (2 * kLargestInput * largest_code(format));
    return max_pairs >= 8 ? 8 : max_pairs >= 4 ? 4 : max_pairs >= 2 ? 2 : 0;
}

// Stores the inputs of a group in the word layout of `dot`, or as four bytes per word.
QUIRE_INLINE void store_inputs(const int8_t* inputs, bool as_bytes, int32_t* words) {
    if (kWordsPerGroup == 8 || as_bytes) {
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
