// A block of 16 activations to NVFP4, the bits of formats/activation.h, for kernels and for host tests.
//
// The rule compares x * g with midpoints times the block's scale. Halves are few, so each such comparison is one of
// bit patterns: for a scale and a g there is a least pattern whose number counts as the next code, and for a g a least
// greatest magnitude that gets the next scale. A table of both, 8 patterns for each of the 126 scales, makes the rest
// integer arithmetic on two values at a time: with the sign bits set as guards, bit 15 of a difference of two patterns
// says which is greater.
//
// The patterns of the table are exact: the sign of fma(x, g, -midpoint) is that of the exact difference, since x * g
// has at most 35 bits and a difference near the midpoints (2^-11 at least) cannot underflow.
//
// fp32 goes the same way, as the bfloat16 that x * g becomes where it is rounded to odd, with the table of g = 1: the
// midpoints have at most 7 bits, one less than bfloat16, so that it compares with them as the exact product does.
#pragma once
#include <cmath>
#include <cstdint>

#include "cuda/device/words.cuh"
#include "formats/activation.h"

#ifdef __CUDACC__
#include <cuda_fp16.h>
#else
#include "formats/float16.h"
#endif
#ifdef __CUDA_ARCH__
#define FP4LINEAR_UNROLL_ON_DEVICE _Pragma("unroll")
#else
#define FP4LINEAR_UNROLL_ON_DEVICE
#endif

namespace fp4linear::cuda::activations {

inline constexpr int block_size = activation::block_size;
inline constexpr int words_of_block = block_size / 2;  // of 32 bits, two values each
inline constexpr int midpoint_count = 7;
inline constexpr int scale_count = 127;  // E4M3 codes 0x00 .. 0x7E
inline constexpr std::uint32_t sign_bits = 0x80008000u;
inline constexpr std::uint32_t greatest_scale = 0x7E;

using words::bits_of_float;
using words::float_of_bits;
using words::permute;

// Byte i of the result is 0xFF where the byte that `selector` names for permute() has its top bit set, else 0.
FP4LINEAR_HOST_DEVICE inline std::uint32_t permute_signs(std::uint32_t low, std::uint32_t high,
                                                         std::uint32_t selector) {
#ifdef __CUDA_ARCH__
    std::uint32_t result;  // bit 3 of a selector spreads the sign
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector | 0x8888u));
    return result;
#else
    return (permute(low, high, selector) >> 7 & 0x01010101u) * 0xFFu;
#endif
}

// The greater of each two unsigned 16-bit lanes.
FP4LINEAR_HOST_DEVICE inline std::uint32_t max_lanes(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxu2(a, b);
#else
    const std::uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
    return (a >> 16 > b >> 16 ? a & 0xFFFF0000u : b & 0xFFFF0000u) | low;
#endif
}

// The greater of each two signed 16-bit lanes.
FP4LINEAR_HOST_DEVICE inline std::uint32_t max_signed_lanes(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
    return __vmaxs2(a, b);
#else
    return max_lanes(a ^ sign_bits, b ^ sign_bits) ^ sign_bits;
#endif
}

// Bits of a where the mask has ones, else of b.
FP4LINEAR_HOST_DEVICE constexpr std::uint32_t select(std::uint32_t mask, std::uint32_t a, std::uint32_t b) {
    return (a & mask) | (b & ~mask);
}

// The two types of x: patterns without their sign, ascending as the numbers do.
struct Float16Pattern {
    static constexpr std::uint32_t infinity = 0x7C00;
    FP4LINEAR_HOST_DEVICE static float value(std::uint32_t pattern) {
#ifdef __CUDA_ARCH__
        return __half2float(__ushort_as_half(static_cast<unsigned short>(pattern)));
#elif defined(__CUDACC__)
        return __half2float(__half(__half_raw{static_cast<unsigned short>(pattern)}));
#else
        return float_from_half(static_cast<std::uint16_t>(pattern));
#endif
    }
    // Of the greatest number that is not above t >= 0.
    FP4LINEAR_HOST_DEVICE static std::uint32_t floor(float t) {
        if (t >= 65536.0f) return infinity;
        if (t < 0x1p-14f) return static_cast<std::uint32_t>(t * 0x1p24f);
        return (bits_of_float(t) - (std::uint32_t{127 - 15} << 23)) >> 13;
    }
};
struct BFloat16Pattern {
    static constexpr std::uint32_t infinity = 0x7F80;
    FP4LINEAR_HOST_DEVICE static float value(std::uint32_t pattern) { return float_of_bits(pattern << 16); }
    FP4LINEAR_HOST_DEVICE static std::uint32_t floor(float t) { return bits_of_float(t) >> 16; }
};

// The number half way up the E4M3 codes: of code n / 2 for even n, else between that one and the next. n < 2 * 0x7F.
FP4LINEAR_HOST_DEVICE inline float scale_value_of_halves(std::uint32_t n) {
    if (n < 16) return static_cast<float>(static_cast<int>(n)) * 0x1p-10f;
    return float_of_bits((n + (std::uint32_t{120} << 4)) << 19);
}

// 1 / g in two factors that neither overflow nor lose bits: one near to 1 / (g * power), and a power of two.
struct Reciprocal {
    float near, power;

    FP4LINEAR_HOST_DEVICE explicit Reciprocal(float g) : power(g < 0x1p-64f ? 0x1p64f : g > 0x1p64f ? 0x1p-64f : 1.0f) {
#ifdef __CUDA_ARCH__
        near = __fdividef(1.0f, g * power);
#else
        near = 1.0f / (g * power);
#endif
    }
};

// The least pattern with x * g > target, or >= target where ties_up; that of infinity where no finite one has. g > 0,
// and target from 2^-11 to 2688.
template <class Pattern>
FP4LINEAR_HOST_DEVICE std::uint32_t least_pattern(float target, float g, Reciprocal reciprocal, bool ties_up) {
    // The quotient is right to 21 bits: no pattern below its floor can do, and the second above it does.
    std::uint32_t pattern = Pattern::floor(target * reciprocal.near * reciprocal.power);
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < 2; ++i) {
        const float difference = fmaf(Pattern::value(pattern), g, -target);
        pattern += difference > 0.0f || (ties_up && difference == 0.0f) ? 0u : 1u;
    }
    return pattern;
}

// Of a scale: the least patterns of codes 1 to 7 in the low and high halves of words 0 to 3, and last that of the
// greatest magnitude that gets the next scale.
struct alignas(16) Thresholds {
    std::uint32_t words[4];
};
inline constexpr int entries_of_scale = 8;

// Entry `index` of a scale's Thresholds.
template <class Pattern>
FP4LINEAR_HOST_DEVICE std::uint16_t threshold(std::uint32_t scale, int index, float g, Reciprocal reciprocal) {
    constexpr std::uint32_t never = 0x7FFF;  // of a finite number
    // 1, 3, 5, 7, 10, 14, 20: the midpoints times 4. And 6 times the midpoint of this scale and the next.
    constexpr std::uint32_t low_quarters = 0x07050301, high_quarters = 0x18140E0A;
    const bool next = index == midpoint_count;
    const std::uint32_t quarters = permute(low_quarters, high_quarters, static_cast<std::uint32_t>(index)) & 0xFFu;
    const float target =
        static_cast<float>(static_cast<int>(quarters)) * 0.25f * scale_value_of_halves(2 * scale + (next ? 1 : 0));
    const bool ties_up = (next ? scale : static_cast<std::uint32_t>(index)) % 2 == 1;  // a tie goes to the even code
    const std::uint32_t pattern = least_pattern<Pattern>(target, g, reciprocal, ties_up);
    return static_cast<std::uint16_t>(scale == (next ? greatest_scale : 0) ? never : pattern);
}

// Fills the table; `thread` of `threads` that share the work. Two patterns are a word, the low half first.
template <class Pattern>
FP4LINEAR_HOST_DEVICE void fill_table(Thresholds* table, float g, int thread, int threads) {
    const Reciprocal reciprocal(g);
    for (int i = thread; i < scale_count * entries_of_scale / 2; i += threads) {
        const auto scale = static_cast<std::uint32_t>(i / 4);
        const std::uint32_t low = threshold<Pattern>(scale, i % 4 * 2, g, reciprocal);
        const std::uint32_t high = threshold<Pattern>(scale, i % 4 * 2 + 1, g, reciprocal);
        table[scale].words[i % 4] = low | high << 16;
    }
}

// The E4M3 code nearest to the amax of a block, as a finite pattern, times g / 6.
template <class Pattern>
FP4LINEAR_HOST_DEVICE std::uint32_t block_scale(std::uint32_t amax, float g, const Thresholds* table) {
    constexpr float most = activation::greatest_product;
    // As an fp32 number times 2^-120 it has the exponent and the leading bits of its E4M3 code, subnormals too. Rounded
    // to nearest with less than a half added, so that the code is right or one too small in spite of three roundings.
    constexpr float sixth = 0x1.555556p-3f;
    constexpr std::uint32_t half = 0x80000, margin = 0x400;
    const float product = fminf(Pattern::value(amax) * g, most);
    const std::uint32_t code = (bits_of_float(product * (sixth * 0x1p-120f)) + half - margin) >> 20;
    return code + (amax >= table[code].words[3] >> 16 ? 1u : 0u);
}

struct QuantizedBlock {
    std::uint32_t codes[2];  // two codes a byte, the first in the lowest bits
    std::uint32_t scale;
};

// x: 16 values as they lie in memory; where a block is short, zeros.
template <class Pattern>
FP4LINEAR_HOST_DEVICE QuantizedBlock quantize_block(const std::uint32_t (&x)[words_of_block], float g,
                                                    const Thresholds* table) {
    std::uint32_t amax = 0;
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < words_of_block; ++i) amax = max_lanes(amax, x[i] | sign_bits);
    amax = (amax >> 16 > (amax & 0xFFFFu) ? amax >> 16 : amax & 0xFFFFu) & 0x7FFFu;
    const bool finite = amax < Pattern::infinity;
    const std::uint32_t scale = block_scale<Pattern>(finite ? amax : 0, g, table);

    const Thresholds row = table[scale];
    std::uint32_t least[midpoint_count];  // in both halves
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < midpoint_count; ++i) least[i] = permute(row.words[i / 2], 0, i % 2 == 0 ? 0x1010 : 0x3232);

    QuantizedBlock result;
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int half = 0; half < 2; ++half) {
        std::uint32_t nibbles[2];  // of two words of x: their low halves in bytes 0 and 1, the high ones in 2 and 3
        FP4LINEAR_UNROLL_ON_DEVICE
        for (int pair = 0; pair < 2; ++pair) {
            std::uint32_t planes[2][4];  // bits 15 and 31 of a word: the sign, and the 3 bits of the count
            FP4LINEAR_UNROLL_ON_DEVICE
            for (int i = 0; i < 2; ++i) {
                const std::uint32_t value = x[4 * half + 2 * pair + i];
                std::uint32_t above[midpoint_count];
                FP4LINEAR_UNROLL_ON_DEVICE
                for (int j = 0; j < midpoint_count; ++j) above[j] = (value | sign_bits) - least[j];
                // Each implies the ones before it, so that parities are the bits of the count.
                planes[i][0] = value;
                planes[i][1] = above[3];
                planes[i][2] = above[1] ^ above[3] ^ above[5];
                planes[i][3] = above[0] ^ above[2] ^ above[4] ^ above[6] ^ planes[i][2];
            }
            std::uint32_t bits[4];
            FP4LINEAR_UNROLL_ON_DEVICE
            for (int plane = 0; plane < 4; ++plane)
                bits[plane] = permute_signs(planes[0][plane], planes[1][plane], 0x7351);
            // The same nibble in both halves of each byte.
            nibbles[pair] =
                select(0xCCCCCCCCu, select(0x88888888u, bits[0], bits[1]), select(0x22222222u, bits[2], bits[3]));
        }
        const std::uint32_t even = permute(nibbles[0], nibbles[1], 0x5410);
        const std::uint32_t odd = permute(nibbles[0], nibbles[1], 0x7632);
        result.codes[half] = finite && scale != 0 ? select(0xF0F0F0F0u, odd, even) : 0u;
    }
    result.scale = finite ? scale : activation::nan_scale;
    return result;
}

// Two products x * g as bfloat16, rounded to odd: cut off, the last bit set where something was cut. g > 0.
FP4LINEAR_HOST_DEVICE inline std::uint32_t odd_products(std::uint32_t x0, std::uint32_t x1, float g) {
#ifdef __CUDA_ARCH__
    // Cut off and rounded up, they differ in the last bit of bfloat16 where they differ.
    const float a = __uint_as_float(x0), b = __uint_as_float(x1);
    const std::uint32_t down = permute(__float_as_uint(__fmul_rz(a, g)), __float_as_uint(__fmul_rz(b, g)), 0x7632);
    const std::uint32_t up = permute(__float_as_uint(__fmul_ru(fabsf(a), g)) + 0xFFFFu,
                                     __float_as_uint(__fmul_ru(fabsf(b), g)) + 0xFFFFu, 0x7632);
    return down | (up & 0x00010001u);
#else
    std::uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
        const double exact = static_cast<double>(float_of_bits(i == 0 ? x0 : x1)) * static_cast<double>(g);
        const auto nearest = static_cast<float>(exact);
        std::uint32_t bits = bits_of_float(nearest);
        if (std::isnan(exact)) {
            bits = 0x7FFFFFFFu;  // as a multiplication on the device gives it
        } else if (!std::isinf(exact)) {
            if (std::fabs(static_cast<double>(nearest)) > std::fabs(exact)) --bits;
            if (static_cast<double>(float_of_bits(bits & 0xFFFF0000u)) != exact) bits |= 0x10000u;
        }
        result |= bits >> 16 << 16 * i;
    }
    return result;
#endif
}

// The greatest finite magnitude of halves, two lanes at a time: infinities and NaN become negative lanes.
template <class Pattern>
struct GreatestFinite {
    static constexpr std::uint32_t bias = (0x8000u - Pattern::infinity) * 0x10001u;
    std::uint32_t lanes = bias;

    FP4LINEAR_HOST_DEVICE void take(std::uint32_t x) { lanes = max_signed_lanes(lanes, (x & ~sign_bits) + bias); }
    [[nodiscard]] FP4LINEAR_HOST_DEVICE std::uint32_t pattern() const {
        const std::uint32_t each = lanes - bias, low = each & 0xFFFFu, high = each >> 16;
        return low > high ? low : high;
    }
};

// Some of the words of memory that was read in aligned pieces, from `shift` bytes on: 0 to 15.
template <int count>
FP4LINEAR_HOST_DEVICE void words_from(const std::uint32_t (&pieces)[count + 4], std::uint32_t shift,
                                      std::uint32_t (&words)[count]) {
    std::uint32_t by_two[count + 2], by_one[count + 1];
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < count + 2; ++i) by_two[i] = (shift & 8u) != 0 ? pieces[i + 2] : pieces[i];
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < count + 1; ++i) by_one[i] = (shift & 4u) != 0 ? by_two[i + 1] : by_two[i];
    const std::uint32_t selector = 0x3210u + 0x1111u * (shift & 3u);
    FP4LINEAR_UNROLL_ON_DEVICE
    for (int i = 0; i < count; ++i) words[i] = permute(by_one[i], by_one[i + 1], selector);
}

// What stands at the multiple of 8 bytes below a block's 8 bytes of codes, `shift` bytes (1 to 7) before them: the end
// of the codes before it and the beginning of its own.
struct CodeWords {
    std::uint32_t words[2];
};
FP4LINEAR_HOST_DEVICE inline CodeWords shifted_codes(CodeWords before, CodeWords own, std::uint32_t shift) {
    const std::uint32_t from[3] = {(shift & 4u) != 0 ? before.words[0] : before.words[1],
                                   (shift & 4u) != 0 ? before.words[1] : own.words[0],
                                   (shift & 4u) != 0 ? own.words[0] : own.words[1]};
    const std::uint32_t bytes = shift & 3u;
    // 4 - bytes of the word before, from there on.
    const std::uint32_t selector = 0x7654u - 0x1111u * bytes;
    return {{permute(from[0], from[1], selector), permute(from[1], from[2], selector)}};
}

// n / divisor for n < 2^31 with a multiplication (Granlund and Montgomery, 1994).
struct Divider {
    std::uint32_t divisor = 1, factor = 0, shift = 0;

    Divider() = default;
    explicit Divider(std::uint32_t by) : divisor(by) {
        while ((std::uint64_t{1} << shift) < by) ++shift;
        factor = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift)) + by - 1) / by);
    }
    [[nodiscard]] FP4LINEAR_HOST_DEVICE std::uint32_t quotient(std::uint32_t n) const {
#ifdef __CUDA_ARCH__
        return __umulhi(2 * n, factor) >> shift;
#else
        return static_cast<std::uint32_t>(std::uint64_t{n} * factor >> 31 >> shift);
#endif
    }
};

// swizzle::offset() of a block, columns: atoms of a row.
FP4LINEAR_HOST_DEVICE constexpr std::uint64_t swizzled_offset(std::uint64_t row, std::uint32_t block,
                                                              std::uint32_t columns) {
    const auto in_atom = static_cast<std::uint32_t>(row % 128);
    return ((row / 128) * columns + block / 4) * 512 + (in_atom % 32 * 16 + in_atom / 32 * 4 + block % 4);
}

// The place in an atom of swizzled scales, 128 rows of 4 blocks, that a byte of it belongs to.
struct AtomPlace {
    std::uint32_t row, block;
    FP4LINEAR_HOST_DEVICE explicit AtomPlace(std::uint32_t byte)
        : row(byte / 16 + byte / 4 % 4 * 32), block(byte % 4) {}
};

}  // namespace fp4linear::cuda::activations
