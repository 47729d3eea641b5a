// One decoder per format, composed from the format's layout of codes and source of scales (format.hpp). All instruction
// sets return the same bits, because the factors multiplied here have few enough bits for an exact product.
//
// A register has kLanes of the 16 outputs of a panel; `lane` is the first of them. `from` points into the panel.
#include "panels/dequantize.isa.hpp"

namespace quire::QUIRE_ISA {
namespace {

typedef Lanes<kLanes>::F F;
typedef Lanes<kLanes>::U U;
typedef Lanes<kLanes>::I I;
static_assert(kWidth % kLanes == 0);

template <typename V>
QUIRE_INLINE V read(const void* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
}

QUIRE_INLINE void write(void* to, U v) { __builtin_memcpy(to, &v, sizeof v); }

QUIRE_INLINE F fp16_values(const uint8_t* from) { return load_halves<kLanes>(from); }

// Converts one byte per lane to integers. Via 16 bits, because compilers convert 8 to 32 bits element by element.
template <typename Byte>
QUIRE_INLINE I integers(const uint8_t* from) {
#if defined(__AVX512F__)
    const __m128i bytes = read<__m128i>(from);
    return (I)(Byte(-1) < 0 ? _mm512_maskz_cvtepi8_epi32(0xFFFF, bytes) : _mm512_maskz_cvtepu8_epi32(0xFFFF, bytes));
#elif defined(__AVX2__)
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (I)(Byte(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
    typedef Byte Bytes __attribute__((vector_size(kLanes)));
    typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));
    return __builtin_convertvector(__builtin_convertvector(read<Bytes>(from), Shorts), I);
#endif
}

QUIRE_INLINE F bytes(const uint8_t* from) { return __builtin_convertvector(integers<uint8_t>(from), F); }
QUIRE_INLINE F signed_bytes(const uint8_t* from) { return __builtin_convertvector(integers<int8_t>(from), F); }

// 2^(exponent - 128): half of the encoded power of two, because kTableMxfp4 has doubled values.
QUIRE_INLINE F powers(const uint8_t* from) {
    const U exponent = (U)integers<uint8_t>(from);
    const U small = exponent == 0u ? U{} + 0x00200000u : U{} + 0x00400000u;
    return (F)(exponent < 2u ? small : (exponent - 1u) << 23);
}

QUIRE_INLINE U lookup(U nibbles, const uint8_t* table) {
#if defined(__AVX512BW__)
    const __m512i bytes = _mm512_maskz_broadcast_i32x4(0xFFFF, read<__m128i>(table));
    return (U)_mm512_shuffle_epi8(bytes, (__m512i)nibbles);
#elif defined(__AVX2__)
    return (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(read<__m128i>(table)), (__m256i)nibbles);
#elif defined(__aarch64__)
    return (U)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)nibbles);
#else
    uint8_t codes[sizeof nibbles];
    __builtin_memcpy(codes, &nibbles, sizeof codes);
    for (uint8_t& code : codes) code = table[code];
    return read<U>(codes);
#endif
}

// Vector k of a group's codes, four bytes per output, from output `lane` on.
template <int bits>
QUIRE_INLINE U codes_of(const uint8_t* group, int k, int lane) {
    const uint8_t* from = group + 4 * lane;
    if constexpr (bits == 8) return read<U>(from + k * kCacheLineBytes);
    const U low = read<U>(from + k % 4 * kCacheLineBytes) >> (k / 4 * 4) & 0x0F0F0F0Fu;
    if constexpr (bits == 4) return low;
    if constexpr (bits == 5) {
        const U high = read<U>(from + 4 * kCacheLineBytes);
        return low | ((k < 4 ? high << (4 - k) : high >> (k - 4)) & 0x10101010u);
    }
    const U high = read<U>(from + (4 + k / 4) * kCacheLineBytes);
    return low | ((k % 4 < 2 ? high << (4 - k % 4 * 2) : high >> (k % 4 * 2 - 4)) & 0x30303030u);
}

// The shape with the format as a compile-time constant.
template <Format format>
QUIRE_INLINE PanelShape typed(const PanelShape& shape) {
    return {format, shape.num_out, shape.num_in, shape.group};
}

template <Format format>
QUIRE_INLINE const uint8_t* group_codes(const GroupRange& span) {
    const PanelShape shape = typed<format>(span.shape);
    return span.panel + shape.codes_offset() + span.first * shape.group_bytes();
}

template <Format format>
void decode_codes(const GroupRange& span, GroupCodes* to) {
    constexpr FormatTraits traits = traits_of(format);
    const uint8_t* from = group_codes<format>(span);
    for (int64_t group = 0; group < span.count; ++group, from += traits.code_bits * kGroupInputs * kWidth / 8)
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k)
#pragma GCC unroll 4
            for (int lane = 0; lane < kWidth; lane += kLanes) {
                U codes = codes_of<traits.code_bits>(from, k, lane);
                if constexpr (traits.codes == Codes::table) codes = lookup(codes, table_of(format));
                write(to[group].bytes[k] + 4 * lane, codes);
            }
}

// Decodes the scales of groups of one super-block, which share the super-block's scale and minimum.
template <Scales scales>
QUIRE_INLINE void decode_super(const uint8_t* from, int64_t first, int64_t count, GroupScales* to, int lane) {
    const F scale = fp16_values(from + 2 * lane);
    [[maybe_unused]] F minimum;
    if constexpr (scales == Scales::super_minimum) minimum = fp16_values(from + 2 * kWidth + 2 * lane);
    from += lane;
    for (int64_t group = first; group < first + count; ++group, ++to) {
        if constexpr (scales == Scales::super_minimum) {
            store(to->scales[0] + lane, scale * bytes(from + (4 + group) * kWidth));
            store(to->term + lane, minimum * bytes(from + (12 + group) * kWidth));
        } else if constexpr (scales == Scales::super_halves) {
            store(to->scales[0] + lane, scale * signed_bytes(from + (2 + 2 * group) * kWidth));
            store(to->scales[1] + lane, scale * signed_bytes(from + (3 + 2 * group) * kWidth));
        } else {
            store(to->scales[0] + lane, scale * signed_bytes(from + (2 + group) * kWidth));
        }
    }
}

template <Format format>
QUIRE_INLINE void decode_one(const PanelShape& shape, const uint8_t* panel, int64_t group, GroupScales& to, int lane) {
    constexpr Scales scales = traits_of(format).scales;
    const uint8_t* from = panel + group * scale_step(scales);
    if constexpr (scales == Scales::half) store(to.scales[0] + lane, fp16_values(from + 2 * lane));
    if constexpr (scales == Scales::power) store(to.scales[0] + lane, powers(from + lane));
    if constexpr (scales == Scales::half_minimum) {
        store(to.scales[0] + lane, fp16_values(from + 2 * lane));
        store(to.term + lane, fp16_values(from + 2 * kWidth + 2 * lane));
    }
    if constexpr (scales == Scales::external_zero_point) {
        const int64_t scale = group * kGroupInputs / shape.group;
        store(to.scales[0] + lane, read<F>(panel + 4 * (scale * kWidth + lane)));
        store(to.term + lane, bytes(panel + (4 * typed<format>(shape).num_scales() + scale) * kWidth + lane));
    }
}

template <Format format>
void decode_scales(const GroupRange& span, GroupScales* to) {
    constexpr Scales scales = traits_of(format).scales;
    for (int lane = 0; lane < kWidth; lane += kLanes)
        if constexpr (is_super(scales)) {
            for (int64_t offset = 0; offset < span.count;) {
                const int64_t group = span.first + offset, rest = 8 - group % 8;
                const int64_t count = rest < span.count - offset ? rest : span.count - offset;
                decode_super<scales>(span.panel + group / 8 * scale_step(scales), group % 8, count, to + offset, lane);
                offset += count;
            }
        } else {
            for (int64_t group = 0; group < span.count; ++group)
                decode_one<format>(span.shape, span.panel, span.first + group, to[group], lane);
        }
}

// Converts codes to weights: (code - offset or zero point) * scale, or code * scale - minimum.
template <Format format>
struct WeightConverter {
    static constexpr FormatTraits traits = traits_of(format);
    static constexpr bool has_minimum = traits.term == Term::minimum;
    static constexpr bool has_halves = traits.scales == Scales::super_halves;
    F scales[2], term;

    QUIRE_INLINE WeightConverter(const GroupScales& from, int lane) {
        for (int half = 0; half < 2; ++half) scales[half] = load<kLanes>(from.scales[has_halves ? half : 0] + lane);
        term = traits.term == Term::none ? splat<kLanes>(static_cast<float>(traits.offset)) : load<kLanes>(from.term + lane);
    }

    QUIRE_INLINE F convert(F code, int k) const {
        if constexpr (has_minimum) return fma_of(code, scales[k / 4], -term);
        return (code - term) * scales[k / 4];
    }
};

// Converts a code to float by setting it as the low bits of 2^23 and subtracting 2^23.
template <Format format>
QUIRE_INLINE void widen_group(const GroupCodes& codes, const GroupScales& scales, float* to) {
    const F shift = splat<kLanes>(0x1p23f);
    for (int lane = 0; lane < kWidth; lane += kLanes) {
        const WeightConverter<format> converter(scales, lane);
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) {
            const U word = read<U>(codes.bytes[k] + 4 * lane);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j)
                store(to + (4 * k + j) * kWidth + lane, converter.convert((F)((word >> 8
                                                                               * j & 0xFFu) | (U)shift) - shift, k));
        }
    }
}

#if defined(__AVX512F__)
// The table of sixteen values fits in one register, so 4-bit codes are looked up with one permutation.
template <Format format>
QUIRE_INLINE void widen_nibbles(const uint8_t* codes, const GroupScales& scales, float* to) {
    constexpr FormatTraits traits = traits_of(format);
    const WeightConverter<format> converter(scales, 0);
    F table;
    for (int code = 0; code < 16; ++code)
        table[code] = traits.codes == Codes::linear ? code : table_of(format)[code];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        const U packed = read<U>(codes + k % 4 * kCacheLineBytes);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            const U indices = packed >> (8 * j + k / 4 * 4);
            store(to + (4 * k + j) * kWidth,
                  converter.convert((F)_mm512_maskz_permutexvar_ps(0xFFFF, (__m512i)indices, (__m512)table), k));
        }
    }
}
#endif

template <Format format>
void widen_coded(const GroupRange& inputs, float* to) {
    for (int64_t index = 0; index < inputs.count / kGroupInputs; ++index, to += kGroupInputs * kWidth) {
        GroupScales scales;
        const GroupRange group = {inputs.shape, inputs.panel, inputs.first / kGroupInputs + index, 1};
        decode_scales<format>(group, &scales);
#if defined(__AVX512F__)
        if constexpr (traits_of(format).code_bits == 4) {
            widen_nibbles<format>(group_codes<format>(group), scales, to);
            continue;
        }
#endif
        GroupCodes codes;
        decode_codes<format>(group, &codes);
        widen_group<format>(codes, scales, to);
    }
}

// fp8 e4m3: a sign, four bits of exponent, three of mantissa; no infinities; all ones is NaN.
QUIRE_INLINE F fp8_values(const uint8_t* from) {
    const U code = (U)integers<uint8_t>(from), magnitude = code & 0x7Fu;
    const F number = (F)(magnitude << 20) * 0x1p120f;
    return (F)((magnitude == 0x7Fu ? U{} + 0x7FC00000u : (U)number) | (code & 0x80u) << 24);
}

template <Format format>
void widen_dense(const GroupRange& inputs, float* to) {
    constexpr int64_t size = traits_of(format).file_bytes;
    const uint8_t* from = inputs.panel + typed<format>(inputs.shape).codes_offset() + inputs.first * size * kWidth;
    for (int64_t i = 0; i < inputs.count; ++i)
#pragma GCC unroll 4
        for (int lane = 0; lane < kWidth; lane += kLanes) {
            const uint8_t* values = from + (i * kWidth + lane) * size;
            F number;
            if constexpr (format == Format::f32) number = read<F>(values);
            if constexpr (format == Format::f16) number = fp16_values(values);
            if constexpr (format == Format::fp8_e4m3)
                number = fp8_values(values) *
                         read<F>(inputs.panel + 4 * ((inputs.first + i) / inputs.shape.group * kWidth + lane));
            store(to + i * kWidth + lane, number);
        }
}

// bf16 weights, stored as pairs of inputs. `inputs.first` is even.
void widen_pairs(const GroupRange& inputs, float* to) {
    const uint8_t* from = inputs.panel + typed<Format::bf16>(inputs.shape).codes_offset() + inputs.first * 2 * kWidth;
    for (int64_t i = 0; i < inputs.count; ++i)
#pragma GCC unroll 4
        for (int lane = 0; lane < kWidth; lane += kLanes) {
            const U pair = read<U>(from + 4 * (i / 2 * kWidth + lane));
            store(to + i * kWidth + lane, (F)(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u));
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
