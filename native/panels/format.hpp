// The memory layout of a weight: panels of 16 consecutive outputs with all their inputs.
//
//     weight  [panel]            zeros after the last output
//     panel   [scales][codes]    each aligned to a cache line
//
// A coded (quantized) format has small codes in groups of 32 inputs, in the order of dot products over four consecutive
// inputs: vector k of a group contains inputs 4k to 4k + 3 of output 0, then of output 1, and so on. Codes of less than
// eight bits are stored as bit planes: the low four bits of vectors k and k + 4 share bytes, the higher bits follow.
// A dense format stores one value after the other: [input][16]; bf16 stores pairs of inputs: [input / 2][16][2].
//
// The table of formats is used for packing, decoding and sizing. A weight is one of
//     scale * (code - offset)       Term::none       scale * code - minimum       Term::minimum
//     scale * (code - zero)         Term::zero
#pragma once

#include "builds/kernels.hpp"

namespace quire {

enum class Format : int {
    f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, int4, int8, fp8_e4m3, count
};

// The kinds of scales in a panel, each stored as [16] consecutive values.
enum class Scales : int {
    none,          // dense values without scales
    half,          // per group: fp16
    half_minimum,  // per group: fp16 scale, fp16 minimum
    super_minimum, // per 256 inputs: fp16 scale, fp16 minimum, eight byte factors for each of the two
    super_halves,  // per 256 inputs: fp16 scale, sixteen signed byte factors, one per 16 inputs
    superblock_signed8,     // per 256 inputs: fp16 scale, eight signed byte factors
    power,         // per group: the exponent of a power of two
    external,         // per `group` inputs (see PanelShape): float32 scale
    external_zero_point,    // like `external`; after all scales, one byte each as zero point
};

enum class Term : int { none, minimum, zero };
enum class Codes : int { dense, linear, table };

struct FormatTraits {
    int file_inputs, file_bytes;  // size of one block in a file
    int code_bits;
    Codes codes;
    int offset;
    Scales scales;
    Term term;
};

constexpr int kWidth = 16, kGroupInputs = 32, kSuper = 256, kCacheLineBytes = 64;

constexpr FormatTraits kFormats[] = {
    {1, 4, 32, Codes::dense, 0, Scales::none, Term::none},
    {1, 2, 16, Codes::dense, 0, Scales::none, Term::none},
    {1, 2, 16, Codes::dense, 0, Scales::none, Term::none},
    {32, 34, 8, Codes::linear, 128, Scales::half, Term::none},
    {32, 18, 4, Codes::linear, 8, Scales::half, Term::none},
    {32, 20, 4, Codes::linear, 0, Scales::half_minimum, Term::minimum},
    {32, 22, 5, Codes::linear, 16, Scales::half, Term::none},
    {32, 24, 5, Codes::linear, 0, Scales::half_minimum, Term::minimum},
    {256, 144, 4, Codes::linear, 0, Scales::super_minimum, Term::minimum},
    {256, 176, 5, Codes::linear, 0, Scales::super_minimum, Term::minimum},
    {256, 210, 6, Codes::linear, 32, Scales::super_halves, Term::none},
    {32, 18, 4, Codes::table, 128, Scales::half, Term::none},
    {256, 136, 4, Codes::table, 128, Scales::superblock_signed8, Term::none},
    {32, 17, 4, Codes::table, 12, Scales::power, Term::none},
    {1, 1, 4, Codes::linear, 0, Scales::external_zero_point, Term::zero},
    {1, 1, 8, Codes::linear, 0, Scales::external_zero_point, Term::zero},
    {1, 1, 8, Codes::dense, 0, Scales::external, Term::none},
};
static_assert(sizeof kFormats / sizeof kFormats[0] == static_cast<int>(Format::count));

QUIRE_INLINE constexpr const FormatTraits& traits_of(Format format) { return kFormats[static_cast<int>(format)]; }

QUIRE_INLINE constexpr bool is_coded(Format format) { return traits_of(format).codes != Codes::dense; }

// The values of the sixteen codes of a table format; the format's offset is added, so that they are unsigned.
constexpr uint8_t kTableIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kTableMxfp4[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

QUIRE_INLINE constexpr const uint8_t* table_of(Format format) { return format == Format::mxfp4 ? kTableMxfp4 : kTableIq4; }

// The largest unsigned value of a code of a coded format.
QUIRE_INLINE constexpr int largest_code(Format format) {
    if (traits_of(format).codes == Codes::linear) return (1 << traits_of(format).code_bits) - 1;
    int largest = 0;
    for (int code = 0; code < 16; ++code)
        if (table_of(format)[code] > largest) largest = table_of(format)[code];
    return largest;
}

QUIRE_INLINE constexpr int64_t pad_to_line(int64_t num_bytes) { return (num_bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes; }

// Bytes per entry of a panel's scales: of one super-block (256 inputs), group (32) or external group.
QUIRE_INLINE constexpr int64_t scale_step(Scales scales) {
    switch (scales) {
        case Scales::half: return 2 * kWidth;
        case Scales::half_minimum: return 4 * kWidth;
        case Scales::super_minimum: return 4 * kWidth + 16 * kWidth;
        case Scales::super_halves: return 2 * kWidth + 16 * kWidth;
        case Scales::superblock_signed8: return 2 * kWidth + 8 * kWidth;
        case Scales::power: return kWidth;
        case Scales::external: return 4 * kWidth;
        case Scales::external_zero_point: return 5 * kWidth;
        default: return 0;
    }
}

QUIRE_INLINE constexpr bool is_super(Scales scales) {
    return scales == Scales::super_minimum || scales == Scales::super_halves || scales == Scales::superblock_signed8;
}

QUIRE_INLINE constexpr bool is_external(Scales scales) { return scales == Scales::external || scales == Scales::external_zero_point; }

// Format and shape of a weight. `group` is the number of inputs per external scale, for formats with external scales.
struct PanelShape {
    Format format;
    int64_t num_out, num_in, group;

    QUIRE_INLINE constexpr const FormatTraits& traits() const { return traits_of(format); }
    QUIRE_INLINE constexpr int64_t num_panels() const { return (num_out + kWidth - 1) / kWidth; }

    QUIRE_INLINE constexpr int64_t num_scales() const {
        const Scales scales = traits().scales;
        const int64_t size = is_super(scales) ? kSuper : is_external(scales) ? group : kGroupInputs;
        return (num_in + size - 1) / size;
    }

    QUIRE_INLINE constexpr int64_t codes_offset() const { return pad_to_line(num_scales()
                                                                             * scale_step(traits().scales)); }
    // Bytes of the codes of one group (32 inputs).
    QUIRE_INLINE constexpr int64_t group_bytes() const { return traits().code_bits * kGroupInputs * kWidth / 8; }
    // An odd number of cache lines, so that consecutive panels use different cache sets.
    QUIRE_INLINE constexpr int64_t panel_bytes() const {
        return ((codes_offset() + pad_to_line(num_in * traits().code_bits * kWidth / 8)) / kCacheLineBytes | 1) * kCacheLineBytes;
    }
    QUIRE_INLINE constexpr int64_t packed_bytes() const { return num_panels() * panel_bytes(); }
};

}  // namespace quire
