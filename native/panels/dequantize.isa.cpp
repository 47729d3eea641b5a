// One decoder for each format, made of how its codes lie and where its scales come from (format.hpp). All of them give
// the same bits on every instruction set: what is multiplied here is short enough for the product to be exact.
#include "panels/dequantize.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kWidth>::F F;
typedef Lanes<kWidth>::U U;
typedef Lanes<kWidth>::I I;

template <typename V>
QUIRE_INLINE V read(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

QUIRE_INLINE void write(void* to, U v) { __builtin_memcpy(to, &v, sizeof v); }

QUIRE_INLINE F halves(const uint8_t* from) { return load_halves<kWidth>(from); }

// Sixteen bytes as integers. Compilers take a step from one to four bytes a number at a time: so by twos.
template <typename Byte>
QUIRE_INLINE I integers(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m128i all = read<__m128i>(from);
    return (I)(Byte(-1) < 0 ? _mm512_maskz_cvtepi8_epi32(0xFFFF, all) : _mm512_maskz_cvtepu8_epi32(0xFFFF, all));
#else
    typedef Byte Bytes __attribute__((vector_size(kWidth)));
    typedef int16_t Shorts __attribute__((vector_size(2 * kWidth)));
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Shorts), I);
#endif
}

QUIRE_INLINE F bytes(const uint8_t* from) { return __builtin_convertvector(integers<uint8_t>(from), F); }
QUIRE_INLINE F signed_bytes(const uint8_t* from) { return __builtin_convertvector(integers<int8_t>(from), F); }

// 2^(exponent - 128): half of what the exponent says, because the table has twice the values.
QUIRE_INLINE F powers(const uint8_t* from) {
    const U exponent = (U)integers<uint8_t>(from);
    const U small = exponent == 0u ? U{} + 0x00200000u : U{} + 0x00400000u;
    return (F)(exponent < 2u ? small : (exponent - 1u) << 23);
}

QUIRE_INLINE U looked_up(U nibbles, const uint8_t* table) {
#if defined(__AVX512BW__)
    const __m512i all = _mm512_maskz_broadcast_i32x4(0xFFFF, read<__m128i>(table));
    return (U)_mm512_shuffle_epi8(all, (__m512i)nibbles);
#else
    uint8_t each[sizeof nibbles];
    __builtin_memcpy(each, &nibbles, sizeof each);
#if defined(__AVX2__)
    const __m256i all = _mm256_broadcastsi128_si256(read<__m128i>(table));
    for (int half = 0; half < 64; half += 32) {
        const __m256i found = _mm256_shuffle_epi8(all, read<__m256i>(each + half));
        __builtin_memcpy(each + half, &found, sizeof found);
    }
#elif defined(__aarch64__)
    for (int part = 0; part < 64; part += 16) vst1q_u8(each + part, vqtbl1q_u8(vld1q_u8(table), vld1q_u8(each + part)));
#else
    for (uint8_t& one : each) one = table[one];
#endif
    return read<U>(each);
#endif
}

// Vector k of a group's codes.
template <int bits>
QUIRE_INLINE U codes_of(const uint8_t* group, int k) {
    if constexpr (bits == 8) return read<U>(group + k * kCacheLineBytes);
    const U low = read<U>(group + k % 4 * kCacheLineBytes) >> (k / 4 * 4) & 0x0F0F0F0Fu;
    if constexpr (bits == 4) return low;
    if constexpr (bits == 5) {
        const U high = read<U>(group + 4 * kCacheLineBytes);
        return low | ((k < 4 ? high << (4 - k) : high >> (k - 4)) & 0x10101010u);
    }
    const U high = read<U>(group + (4 + k / 4) * kCacheLineBytes);
    return low | ((k % 4 < 2 ? high << (4 - k % 4 * 2) : high >> (k % 4 * 2 - 4)) & 0x30303030u);
}

// The shape with a format that the compiler knows.
template <Format format>
QUIRE_INLINE PanelShape known(const PanelShape& shape) {
    return {format, shape.num_out, shape.num_in, shape.group};
}

template <Format format>
QUIRE_INLINE const uint8_t* codes_at(const GroupRange& span) {
    const PanelShape shape = known<format>(span.shape);
    return span.panel + shape.codes_at() + span.first * shape.group_bytes();
}

template <Format format>
void decode_codes(const GroupRange& span, GroupCodes* to) {
    constexpr FormatTraits traits = traits_of(format);
    const uint8_t* from = codes_at<format>(span);
    for (int64_t at = 0; at < span.count; ++at, from += traits.code_bits * kGroupInputs * kWidth / 8)
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            U codes = codes_of<traits.code_bits>(from, k);
            if constexpr (traits.codes == Codes::table)
                codes = looked_up(codes, format == Format::mxfp4 ? kTableMxfp4 : kTableIq4);
            write(to[at].bytes[k], codes);
        }
}

// Groups of one super-block have its numbers in common.
template <Scales scales>
QUIRE_INLINE void decode_super(const uint8_t* from, int64_t first, int64_t count, GroupScales* to) {
    const F scale = halves(from);
    [[maybe_unused]] F minimum;
    if constexpr (scales == Scales::super_minimum) minimum = halves(from + 2 * kWidth);
    for (int64_t at = first; at < first + count; ++at, ++to) {
        if constexpr (scales == Scales::super_minimum) {
            store(to->scales[0], scale * bytes(from + (4 + at) * kWidth));
            store(to->term, minimum * bytes(from + (12 + at) * kWidth));
        } else if constexpr (scales == Scales::super_halves) {
            store(to->scales[0], scale * signed_bytes(from + (2 + 2 * at) * kWidth));
            store(to->scales[1], scale * signed_bytes(from + (3 + 2 * at) * kWidth));
        } else {
            store(to->scales[0], scale * signed_bytes(from + (2 + at) * kWidth));
        }
    }
}

template <Format format>
QUIRE_INLINE void decode_one(const PanelShape& shape, const uint8_t* panel, int64_t group, GroupScales& to) {
    constexpr Scales scales = traits_of(format).scales;
    const uint8_t* from = panel + group * scale_step(scales);
    if constexpr (scales == Scales::half) store(to.scales[0], halves(from));
    if constexpr (scales == Scales::power) store(to.scales[0], powers(from));
    if constexpr (scales == Scales::half_minimum) {
        store(to.scales[0], halves(from));
        store(to.term, halves(from + 2 * kWidth));
    }
    if constexpr (scales == Scales::external_zero_point) {
        const int64_t at = group * kGroupInputs / shape.group;
        store(to.scales[0], read<F>(panel + at * 4 * kWidth));
        store(to.term, bytes(panel + (4 * known<format>(shape).num_scales() + at) * kWidth));
    }
}

template <Format format>
void decode_scales(const GroupRange& span, GroupScales* to) {
    constexpr Scales scales = traits_of(format).scales;
    if constexpr (is_super(scales)) {
        for (int64_t at = 0; at < span.count;) {
            const int64_t group = span.first + at, left = 8 - group % 8, count = span.count - at;
            decode_super<scales>(span.panel + group / 8 * scale_step(scales), group % 8, count < left ? count : left,
                                 to + at);
            at += left;
        }
    } else {
        for (int64_t at = 0; at < span.count; ++at)
            decode_one<format>(span.shape, span.panel, span.first + at, to[at]);
    }
}

// A code's number: what it is multiplied with, and what is taken away before or after.
template <Format format>
struct Numbers {
    static constexpr FormatTraits traits = traits_of(format);
    static constexpr bool has_minimum = traits.term == Term::minimum;
    static constexpr bool has_halves = traits.scales == Scales::super_halves;
    F scales[2], term;

    explicit QUIRE_INLINE Numbers(const GroupScales& from) {
        for (int half = 0; half < 2; ++half) scales[half] = load<kWidth>(from.scales[has_halves ? half : 0]);
        term = traits.term == Term::none ? splat<kWidth>(static_cast<float>(traits.offset)) : load<kWidth>(from.term);
    }

    QUIRE_INLINE F of(F code, int k) const {
        if constexpr (has_minimum) return fused(code, scales[k / 4], -term);
        return (code - term) * scales[k / 4];
    }
};

// A code goes into the low bits of 2^23, which is then taken away again.
template <Format format>
QUIRE_INLINE void widen_group(const GroupCodes& codes, const GroupScales& scales, float* to) {
    const Numbers<format> numbers(scales);
    const F lift = splat<kWidth>(0x1p23f);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const U four = read<U>(codes.bytes[k]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j)
            store(to + (4 * k + j) * kWidth, numbers.of((F)((four >> 8 * j & 0xFFu) | (U)lift) - lift, k));
    }
}

#if defined(__AVX512F__)
// Sixteen numbers are one register: half a byte is looked up there as it stands.
template <Format format>
QUIRE_INLINE void widen_nibbles(const uint8_t* codes, const GroupScales& scales, float* to) {
    constexpr FormatTraits traits = traits_of(format);
    const Numbers<format> numbers(scales);
    F table;
    for (int code = 0; code < 16; ++code)
        table[code] = traits.codes == Codes::linear ? code : (format == Format::mxfp4 ? kTableMxfp4 : kTableIq4)[code];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const U four = read<U>(codes + k % 4 * kCacheLineBytes);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const U places = four >> (8 * j + k / 4 * 4);
            store(to + (4 * k + j) * kWidth,
                  numbers.of((F)_mm512_maskz_permutexvar_ps(0xFFFF, (__m512i)places, (__m512)table), k));
        }
    }
}
#endif

template <Format format>
void widen_coded(const GroupRange& inputs, float* to) {
    for (int64_t at = 0; at < inputs.count / kGroupInputs; ++at, to += kGroupInputs * kWidth) {
        GroupScales scales;
        const GroupRange one = {inputs.shape, inputs.panel, inputs.first / kGroupInputs + at, 1};
        decode_scales<format>(one, &scales);
#if defined(__AVX512F__)
        if constexpr (traits_of(format).code_bits == 4) {
            widen_nibbles<format>(codes_at<format>(one), scales, to);
            continue;
        }
#endif
        GroupCodes codes;
        decode_codes<format>(one, &codes);
        widen_group<format>(codes, scales, to);
    }
}

// e4m3: a sign, four bits of exponent, three of mantissa; no infinities, all ones is no number.
QUIRE_INLINE F eights(const uint8_t* from) {
    const U code = (U)integers<uint8_t>(from), size = code & 0x7Fu;
    const F number = (F)(size << 20) * 0x1p120f;
    return (F)((size == 0x7Fu ? U{} + 0x7FC00000u : (U)number) | (code & 0x80u) << 24);
}

template <Format format>
void widen_dense(const GroupRange& inputs, float* to) {
    constexpr int64_t step = traits_of(format).file_bytes * kWidth;
    const uint8_t* from = inputs.panel + known<format>(inputs.shape).codes_at() + inputs.first * step;
    for (int64_t i = 0; i < inputs.count; ++i, from += step) {
        F number;
        if constexpr (format == Format::f32) number = read<F>(from);
        if constexpr (format == Format::f16) number = halves(from);
        if constexpr (format == Format::fp8_e4m3)
            number = eights(from) * read<F>(inputs.panel + (inputs.first + i) / inputs.shape.group * 4 * kWidth);
        store(to + i * kWidth, number);
    }
}

// Two inputs side by side: from an even one on.
void widen_pairs(const GroupRange& inputs, float* to) {
    const uint8_t* from = inputs.panel + known<Format::bf16>(inputs.shape).codes_at() + inputs.first * 2 * kWidth;
    for (int64_t i = 0; i < inputs.count; ++i) {
        const U pair = read<U>(from + i / 2 * 4 * kWidth);
        store(to + i * kWidth, (F)(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u));
    }
}

template <Format format>
constexpr Dequantizer make() {
    if constexpr (is_coded(format))
        return {decode_codes<format>, decode_scales<format>, widen_coded<format>};
    else if constexpr (format == Format::bf16)
        return {nullptr, nullptr, widen_pairs};
    else
        return {nullptr, nullptr, widen_dense<format>};
}

constexpr Dequantizer kDecoders[] = {
    make<Format::f32>(),    make<Format::f16>(),    make<Format::bf16>(),  make<Format::q8_0>(), make<Format::q4_0>(),
    make<Format::q4_1>(),   make<Format::q5_0>(),   make<Format::q5_1>(),  make<Format::q4_k>(), make<Format::q5_k>(),
    make<Format::q6_k>(),   make<Format::iq4_nl>(), make<Format::iq4_xs>(), make<Format::mxfp4>(),
    make<Format::int4>(),   make<Format::int8>(),   make<Format::fp8_e4m3>(),
};

}  // namespace

const Dequantizer& decoder_of(Format format) { return kDecoders[static_cast<int>(format)]; }

}  // namespace quire::QUIRE_ISA
