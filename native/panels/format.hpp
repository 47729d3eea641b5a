// How a weight of some format lies in memory: panels of 16 neighbouring outputs, each from its first input to its last.
//
//     weight  [panel]            zeros behind the last output
//     panel   [scales][codes]    both beginning a cache line
//
// A coded format has small codes by groups of 32 inputs, in the order in which four neighbouring inputs are multiplied
// at once: vector k of a group holds inputs 4k to 4k + 3 of output 0, then those of output 1, and so on. Codes of less
// than eight bits are planes: the low four bits of vectors k and k + 4 share bytes, the bits above lie behind them.
// A dense format has one number after the other: [input][16]; bf16 has two inputs side by side: [input / 2][16][2].
//
// Everything that packs, decodes or sizes a format reads this one table. A weight is
//
//     scale * (code - offset)       Term::none       scale * code - minimum       Term::minimum
//     scale * (code - zero)         Term::zero
#pragma once

#include "builds/kernels.hpp"

namespace quire {

enum class Format : int {
    f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, int4, int8, fp8_e4m3, count
};

// Where the scales of a panel come from; all of them [16] side by side.
enum class Scales : int {
    none,          // dense numbers as they are
    half,          // per group: fp16
    half_minimum,  // per group: fp16 scale, fp16 minimum
    super_minimum, // per 256 inputs: fp16 scale, fp16 minimum, eight byte factors of each
    super_halves,  // per 256 inputs: fp16 scale, sixteen signed byte factors: one for 16 inputs
    superblock_signed8,     // per 256 inputs: fp16 scale, eight signed byte factors
    power,         // per group: the exponent of a power of two
    external,         // per `group` inputs, a number of the weight: float32 scale
    external_zero_point,    // the same and, behind all of them, a byte that stands for zero
};

enum class Term : int { none, minimum, zero };
enum class Codes : int { dense, linear, table };

struct FormatTraits {
    int file_inputs, file_bytes;  // of one block in a file
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
    {32, 17, 4, Codes::table, 128, Scales::power, Term::none},
    {1, 1, 4, Codes::linear, 0, Scales::external_zero_point, Term::zero},
    {1, 1, 8, Codes::linear, 0, Scales::external_zero_point, Term::zero},
    {1, 1, 8, Codes::dense, 0, Scales::external, Term::none},
};
static_assert(sizeof kFormats / sizeof kFormats[0] == static_cast<int>(Format::count));

QUIRE_INLINE constexpr const FormatTraits& traits_of(Format format) { return kFormats[static_cast<int>(format)]; }

QUIRE_INLINE constexpr bool is_coded(Format format) { return traits_of(format).codes != Codes::dense; }

// Signed values of a table's sixteen codes, 128 above: what is multiplied has no sign.
constexpr uint8_t kTableIq4[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kTableMxfp4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

QUIRE_INLINE constexpr int64_t whole_lines(int64_t num_bytes) { return (num_bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes; }

// Bytes of the scales of one super-block, group or given group of a panel.
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

// A weight of one format: `group` is the number of inputs that share a scale where the format leaves that open.
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

    QUIRE_INLINE constexpr int64_t codes_at() const { return whole_lines(num_scales() * scale_step(traits().scales)); }
    // Codes of 32 inputs.
    QUIRE_INLINE constexpr int64_t group_bytes() const { return traits().code_bits * kGroupInputs * kWidth / 8; }
    // An odd number of cache lines, so that neighbouring panels do not fall onto each other in the cache.
    QUIRE_INLINE constexpr int64_t panel_bytes() const {
        return ((codes_at() + whole_lines(num_in * traits().code_bits * kWidth / 8)) / kCacheLineBytes | 1) * kCacheLineBytes;
    }
    QUIRE_INLINE constexpr int64_t packed_bytes() const { return num_panels() * panel_bytes(); }
};

}  // namespace quire
