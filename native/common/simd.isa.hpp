// Vectors of floats as compiler vector types, so that one source file serves all instruction sets, and the exp function
// of all kernels. Included only by files that are compiled once per instruction set (QUIRE_ISA is the build's name).
//
// Such files use no templates or inline functions of the standard library, because the linker keeps one copy of each,
// and an AVX-512 copy would crash CPUs without AVX-512. So all definitions in this file are in the namespace of the
// build.
#pragma once

#include <cstdint>

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "builds/kernels.hpp"

namespace quire::QUIRE_ISA {

template <int N>
struct Lanes {
    typedef float F __attribute__((vector_size(4 * N)));
    typedef uint32_t U __attribute__((vector_size(4 * N)));
    typedef int32_t I __attribute__((vector_size(4 * N)));
    typedef uint16_t H __attribute__((vector_size(2 * N)));
};

#if defined(__AVX512F__)
constexpr int kLanes = 16, kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kRegisters = 32;
#else
constexpr int kLanes = 4, kRegisters = 16;
#endif

typedef uint16_t bf16;

template <int N>
QUIRE_INLINE typename Lanes<N>::F splat(float x) {
    return x - typename Lanes<N>::F{};  // minus, because -0 + 0 would be +0
}

template <int N>
QUIRE_INLINE typename Lanes<N>::F load(const float* from) {
    typename Lanes<N>::F v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

template <int N>
QUIRE_INLINE typename Lanes<N>::F load(const bf16* from) {
    typename Lanes<N>::H half;
    __builtin_memcpy(&half, from, sizeof half);
    return (typename Lanes<N>::F)(__builtin_convertvector(half, typename Lanes<N>::U) << 16);
}

// Converts fp16 to float exactly, including subnormals.
template <int N>
QUIRE_INLINE typename Lanes<N>::F load_halves(const void* from) {
    typedef typename Lanes<N>::F F;
    typedef typename Lanes<N>::U U;
#if defined(__AVX512F__)
    if constexpr (N == 16) {
        __m256i bits;
        __builtin_memcpy(&bits, from, sizeof bits);
        return (F)_mm512_maskz_cvtph_ps(0xFFFF, bits);
    }
#elif defined(__F16C__)
    if constexpr (N == 16) {
        F result;
        const auto low = load_halves<8>(from), high = load_halves<8>(static_cast<const char*>(from) + 16);
        __builtin_memcpy(&result, &low, sizeof low);
        __builtin_memcpy(reinterpret_cast<char*>(&result) + sizeof low, &high, sizeof high);
        return result;
    }
    if constexpr (N == 8) return (F)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#endif
    typename Lanes<N>::H bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    const U half = __builtin_convertvector(bits, U);
    const U special = (half & 0x7C00u) == 0x7C00u ? U{} + 0x7F800000u : U{};
    const F size = (F)((half & 0x7FFFu) << 13) * 0x1p112f;
    return (F)((U)size | special | (half & 0x8000u) << 16);
}

template <int N>
QUIRE_INLINE typename Lanes<N>::F load(const int8_t* from) {
    typedef typename Lanes<N>::I I;
    typedef typename Lanes<N>::F F;
#if defined(__AVX512F__)
    if constexpr (N == 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return __builtin_convertvector((I)_mm512_maskz_cvtepi8_epi32(0xFFFF, codes), F);
    }
#endif
#if defined(__AVX2__)
    if constexpr (N == 8) {
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
        return __builtin_convertvector((I)_mm256_cvtepi8_epi32(codes), F);
    }
#endif
    typedef int8_t Codes __attribute__((vector_size(N)));
    Codes codes;
    __builtin_memcpy(&codes, from, sizeof codes);
    return __builtin_convertvector(__builtin_convertvector(codes, I), F);
}

// load_pair loads 2N elements as two vectors: of float and int8, the first N and the next N; of bf16, the elements with
// even and with odd indices (`is_deinterleaved`), which costs one operation per vector instead of two. `interleave`
// restores the order in two vectors of results.
template <typename T>
constexpr bool is_deinterleaved = sizeof(T) == 2;

// Whether elements are stored as 8-bit codes with quantization scales.
template <typename T>
constexpr bool is_quantized = sizeof(T) == 1;

template <int N>
QUIRE_INLINE void load_pair(const float* from, typename Lanes<N>::F& first, typename Lanes<N>::F& second) {
    first = load<N>(from);
    second = load<N>(from + N);
}

template <int N>
QUIRE_INLINE void load_pair(const bf16* from, typename Lanes<N>::F& even, typename Lanes<N>::F& odd) {
    typename Lanes<N>::U pairs;  // little-endian: the even index is the low half
    __builtin_memcpy(&pairs, from, sizeof pairs);
    even = (typename Lanes<N>::F)(pairs << 16);
    odd = (typename Lanes<N>::F)(pairs & 0xFFFF0000u);
}

template <int N>
QUIRE_INLINE void load_pair(const int8_t* from, typename Lanes<N>::F& first, typename Lanes<N>::F& second) {
    first = load<N>(from);
    second = load<N>(from + N);
}

template <int N>
QUIRE_INLINE void interleave(typename Lanes<N>::F& even, typename Lanes<N>::F& odd) {
    typedef typename Lanes<N>::I I;
    I low, high;
    for (int l = 0; l < N; ++l) {
        low[l] = l % 2 * N + l / 2;
        high[l] = low[l] + N / 2;
    }
#if defined(__clang__)
    const auto e = even, o = odd;
    for (int l = 0; l < N; ++l) {
        even[l] = l % 2 ? o[l / 2] : e[l / 2];
        odd[l] = l % 2 ? o[(l + N) / 2] : e[(l + N) / 2];
    }
#else
    const auto e = even, o = odd;
    even = __builtin_shuffle(e, o, low);
    odd = __builtin_shuffle(e, o, high);
#endif
}

// Forces the compiler to keep a loaded vector in a register instead of loading it again for each use.
template <typename V>
QUIRE_INLINE V keep_in_register(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__x86_64__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

template <typename V>
QUIRE_INLINE void store(float* to, V v) {
    __builtin_memcpy(to, &v, sizeof v);
}

// Loads the first `count` of N lanes and sets the others to zero, so that a remainder is computed like a full vector.
template <int N>
QUIRE_INLINE typename Lanes<N>::F load_part(const float* from, int64_t count) {
    float lanes[N] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = from[i];
    return load<N>(lanes);
}

template <typename V>
QUIRE_INLINE void store_part(float* to, V v, int64_t count) {
    float lanes[sizeof(V) / 4];
    store(lanes, v);
    for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

QUIRE_INLINE void put(float* to, float x) { *to = x; }

// Rounds to nearest, ties to even; every NaN becomes the quiet NaN.
QUIRE_INLINE void put(bf16* to, float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    *to = x != x ? 0x7FC0 : static_cast<bf16>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// a * b + c, with one rounding if the instruction set has it. A build always does the same, so all rows are equal.
template <typename V>
QUIRE_INLINE V fma_of(V a, V b, V c) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#endif
#if defined(__FMA__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    if constexpr (sizeof(V) == 16) return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
    return a * b + c;
}

// The elementwise maximum of a and b; b where a or b is NaN.
template <typename V>
QUIRE_INLINE V max_of(V a, V b) {
#if defined(__AVX512F__)
    if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
#endif
#if defined(__AVX__)
    if constexpr (sizeof(V) == 32) return (V)_mm256_max_ps((__m256)a, (__m256)b);
#endif
    return a > b ? a : b;
}

template <int N>
QUIRE_INLINE typename Lanes<N / 2>::F low_half(typename Lanes<N>::F v) {
    typename Lanes<N / 2>::F half;
    __builtin_memcpy(&half, &v, sizeof half);
    return half;
}

template <int N>
QUIRE_INLINE typename Lanes<N / 2>::F high_half(typename Lanes<N>::F v) {
    typename Lanes<N / 2>::F half;
    __builtin_memcpy(&half, reinterpret_cast<const char*>(&v) + sizeof half, sizeof half);
    return half;
}

// Sums the lanes by adding halves, in a fixed order.
template <int N>
QUIRE_INLINE float sum_lanes(typename Lanes<N>::F v) {
    if constexpr (N == 2) {
        return v[0] + v[1];
    } else {
        return sum_lanes<N / 2>(low_half<N>(v) + high_half<N>(v));
    }
}

template <int N>
QUIRE_INLINE float max_lanes(typename Lanes<N>::F v) {
    if constexpr (N == 2) {
        return v[0] > v[1] ? v[0] : v[1];
    } else {
        auto a = low_half<N>(v), b = high_half<N>(v);
        return max_lanes<N / 2>(a > b ? a : b);
    }
}

// e^x for x < 88, within 2 ulp for x <= 0: exactly 1 at 0, exactly 0 below -87.336 (the last normal result) down to
// -infinity; NaN stays NaN. No fused operations, so that all builds return the same bits.
template <int N>
QUIRE_INLINE typename Lanes<N>::F exp_of(typename Lanes<N>::F x) {
    typedef typename Lanes<N>::F F;
    typedef typename Lanes<N>::U U;
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    F shifted = x * 1.44269504088896341f + round;
    F n = shifted - round;
    F r = x - n * 0.693359375f;  // ln 2 in two parts; the first has few bits, so that the product is exact
    r = r - n * -2.12194440e-4f;
    F p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    F y = (p * (r * r) + r) + 1.0f;
    U power = ((U)shifted - (0x4B400000u - 127u)) << 23;
    F scaled = y * (F)power;
    return x < -87.336f ? F{} : scaled;
}

}  // namespace quire::QUIRE_ISA
