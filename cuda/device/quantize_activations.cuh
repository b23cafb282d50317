// A block of 16 half-precision activations to NVFP4, the bits of formats/activation.h, for kernels and for host tests.
//
// The rule compares x * g with midpoints times the block's scale. Halves are few, so each such comparison is one of
// bit patterns: for a scale and a g there is a least pattern whose number counts as the next code, and for a g a least
// greatest magnitude that gets the next scale. A table of both, 8 patterns for each of the 126 scales, makes the rest
// integer arithmetic on two values at a time: with the sign bits set as guards, bit 15 of a difference of two patterns
// says which is greater.
//
// The patterns of the table are exact: the sign of fma(x, g, -midpoint) is that of the exact difference, since x * g
// has at most 35 bits and a difference near the midpoints (2^-11 at least) cannot underflow.
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

// The number of an E4M3 code from 0x00 to 0x7E.
FP4LINEAR_HOST_DEVICE inline float scale_value(std::uint32_t code) {
    if (code < 8) return static_cast<float>(code) * 0x1p-9f;
    return float_of_bits((code + (std::uint32_t{120} << 3)) << 20);
}

// The least pattern with x * g > target, or >= target where ties_up; that of infinity where no finite one has. g > 0,
// and target from 2^-11 to 2688.
template <class Pattern>
FP4LINEAR_HOST_DEVICE std::uint32_t least_pattern(float target, float g, bool ties_up) {
    // The quotient is right to half a bit in 24: no pattern below its floor can do, and the second above it does.
    std::uint32_t pattern = Pattern::floor(target / g);
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
FP4LINEAR_HOST_DEVICE std::uint16_t threshold(std::uint32_t scale, int index, float g) {
    constexpr std::uint32_t never = 0x7FFF;  // of a finite number
    std::uint32_t pattern = never;
    if (index == midpoint_count) {
        // 6 times the midpoint of this scale and the next; a tie goes to the even code.
        if (scale < greatest_scale)
            pattern =
                least_pattern<Pattern>(3.0f * (scale_value(scale) + scale_value(scale + 1)), g, (scale + 1) % 2 == 0);
    } else if (scale > 0) {
        constexpr std::uint64_t quarters = 0x140E0A07050301u;  // 1, 3, 5, 7, 10, 14, 20: the midpoints times 4
        const auto quarter = static_cast<float>(quarters >> 8 * index & 0xFFu);
        pattern = least_pattern<Pattern>(quarter * 0.25f * scale_value(scale), g, index % 2 == 1);
    }
    return static_cast<std::uint16_t>(pattern);
}

// Fills the table; `thread` of `threads` that share the work. Two patterns are a word, the low half first.
template <class Pattern>
FP4LINEAR_HOST_DEVICE void fill_table(Thresholds* table, float g, int thread, int threads) {
    for (int i = thread; i < scale_count * entries_of_scale / 2; i += threads) {
        const auto scale = static_cast<std::uint32_t>(i / 4);
        const std::uint32_t low = threshold<Pattern>(scale, i % 4 * 2, g);
        table[scale].words[i % 4] = low | static_cast<std::uint32_t>(threshold<Pattern>(scale, i % 4 * 2 + 1, g)) << 16;
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

// The greatest finite magnitude of two values, as a pattern; infinities and NaN count as 0.
template <class Pattern>
FP4LINEAR_HOST_DEVICE std::uint32_t finite_magnitudes(std::uint32_t x) {
    constexpr std::uint32_t infinity = Pattern::infinity * 0x10001u;
    const std::uint32_t special = ((x | sign_bits) - infinity) >> 15 & 0x00010001u;
    return x & ~sign_bits & ~(special * 0xFFFFu);
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

}  // namespace fp4linear::cuda::activations
