// Activations to NVFP4: what a block of 16 values becomes, for the host and for kernels alike.
//
// With g the global scale of x (the reciprocal convention: x is multiplied by it, 2688 / amax fills the range), a block
// is
//     scale  = E4M3(amax / 6 * g)            to nearest even, at most 448
//     code_i = E2M1(x_i * g / e4m3(scale))   to nearest even, at most 6; the sign of x_i stays, also that of zero
// each as if computed without error and then rounded once. A block whose scale rounds to 0 has all codes 0. A block
// with an infinity or a NaN has the scale NaN and all codes 0: E4M3 has no infinity, and a finite stand-in would hide
// it.
//
// All is done on the bits of fp32 numbers with integers: no rounding mode, flush to zero, contraction or approximate
// reciprocal can move a bit. A product x * g is rounded to odd (cut off, the last bit set where something was cut): it
// then compares with any number of fewer bits as the exact product does, and every midpoint has at most 9 bits.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define FP4LINEAR_HOST_DEVICE __host__ __device__
#else
#define FP4LINEAR_HOST_DEVICE
#endif

namespace fp4linear::activation {

inline constexpr int block_size = 16;
inline constexpr std::uint8_t nan_scale = 0x7F;
inline constexpr float greatest_product = 2688.0f;  // 6 * 448: the g that fills the range is this / amax
inline constexpr std::uint32_t magnitude_bits = 0x7FFFFFFFu;
inline constexpr std::uint32_t infinity_bits = 0x7F800000u;
inline constexpr std::uint32_t greatest_finite_bits = 0x7F7FFFFFu;

// A positive finite fp32 number as mantissa * 2^(exponent - 150), mantissa in [2^23, 2^24).
struct Split {
    std::uint32_t mantissa;
    std::int32_t exponent;
};

FP4LINEAR_HOST_DEVICE constexpr Split split(std::uint32_t bits) {
    std::uint32_t mantissa = bits & 0x7FFFFFu;
    auto exponent = static_cast<std::int32_t>(bits >> 23);
    if (exponent != 0) return {mantissa | 0x800000u, exponent};
    for (exponent = 1; mantissa != 0 && (mantissa & 0x800000u) == 0; --exponent) mantissa <<= 1;
    return {mantissa, exponent};
}

// |x| * g as the bits of an fp32 number, rounded to odd. magnitude: the bits of a finite |x|. Beyond the range it is
// the greatest finite number, below 2^-126 zero: both lie outside of all that the formats tell apart.
FP4LINEAR_HOST_DEVICE constexpr std::uint32_t product(std::uint32_t magnitude, Split g) {
    if (magnitude == 0) return 0;
    const Split x = split(magnitude);
    const std::uint64_t exact = static_cast<std::uint64_t>(x.mantissa) * g.mantissa;  // in [2^46, 2^48)
    const auto shift = static_cast<std::int32_t>(23 + (exact >> 47));
    const std::uint32_t cut = (exact & ((std::uint64_t{1} << shift) - 1)) != 0 ? 1u : 0u;
    const std::uint32_t mantissa = static_cast<std::uint32_t>(exact >> shift) | cut;
    const std::int32_t exponent = x.exponent + g.exponent - 150 + shift;
    if (exponent >= 255) return greatest_finite_bits;
    if (exponent <= 0) return 0;
    return (static_cast<std::uint32_t>(exponent) << 23) | (mantissa & 0x7FFFFFu);
}

// The E4M3 byte nearest to amax * g / 6, from product(amax, g).
FP4LINEAR_HOST_DEVICE constexpr std::uint8_t block_scale(std::uint32_t amax_times_g) {
    if (amax_times_g == 0) return 0;
    const auto exponent = static_cast<std::int32_t>(amax_times_g >> 23);
    const std::uint32_t dividend = ((amax_times_g & 0x7FFFFFu) | 0x800000u) << 2;
    // The quotient is sixth * 2^(exponent - 153), 24 or 25 bits, cut off: a step of amax_times_g is 4 of the dividend,
    // so what lies beside six times a midpoint does not get its quotient.
    const std::uint32_t sixth = dividend / 3;
    const auto wide = static_cast<std::int32_t>(sixth >> 24);
    const std::int32_t power = exponent - 153 + 23 + wide;  // of two, of the leading bit
    const bool subnormal = power < -6;
    // The bits below the format's last one: 2^(power - 3), or 2^-9 for subnormals.
    const std::int32_t shift = subnormal ? 144 - exponent : 20 + wide;
    if (shift > 26) return 0;
    const std::uint32_t rounded = (sixth + (1u << (shift - 1)) - 1u + ((sixth >> shift) & 1u)) >> shift;
    const std::int32_t code = static_cast<std::int32_t>(rounded) + (subnormal ? 0 : 8 * (power + 6));
    return static_cast<std::uint8_t>(code > 0x7E ? 0x7E : code);
}

// The midpoints between the E2M1 magnitudes, times a block's scale: bits of fp32 numbers, all of them exact.
struct Midpoints {
    std::int32_t bits[7];
};

// scale: an E4M3 byte from 0x01 to 0x7E.
FP4LINEAR_HOST_DEVICE constexpr Midpoints midpoints(std::uint8_t scale) {
    constexpr std::uint32_t quarters[7] = {1, 3, 5, 7, 10, 14, 20};
    const std::int32_t exponent = scale >> 3;
    const std::uint32_t mantissa = (scale & 7u) | (exponent != 0 ? 8u : 0u);
    const std::int32_t last_bit = (exponent != 0 ? exponent : 1) - 10 - 2;  // of mantissa * quarters, as a power of two
    Midpoints result{};
    for (int i = 0; i < 7; ++i) {
        const Split integer = split(quarters[i] * mantissa);  // as a subnormal number: * 2^-149
        result.bits[i] = static_cast<std::int32_t>(
            (static_cast<std::uint32_t>(integer.exponent + 149 + last_bit) << 23) | (integer.mantissa & 0x7FFFFFu));
    }
    return result;
}

// The E2M1 code of x. x_bits: of the fp32 number; product_bits: product(|x|, g). A tie goes to the even code.
FP4LINEAR_HOST_DEVICE constexpr std::uint8_t code(std::uint32_t x_bits, std::uint32_t product_bits,
                                                  const Midpoints& middle) {
    const auto p = static_cast<std::int32_t>(product_bits);
    const std::int32_t magnitude = (p > middle.bits[0] ? 1 : 0) + (p >= middle.bits[1] ? 1 : 0) +
                                   (p > middle.bits[2] ? 1 : 0) + (p >= middle.bits[3] ? 1 : 0) +
                                   (p > middle.bits[4] ? 1 : 0) + (p >= middle.bits[5] ? 1 : 0) +
                                   (p > middle.bits[6] ? 1 : 0);
    return static_cast<std::uint8_t>(((x_bits >> 28) & 8u) | static_cast<std::uint32_t>(magnitude));
}

// Quantises x[0, count), count from 1 to 16, the bits of fp32 numbers: its scale, and `count` codes. g > 0, finite.
FP4LINEAR_HOST_DEVICE constexpr std::uint8_t quantize_block(const std::uint32_t* x, int count, Split g,
                                                            std::uint8_t* codes) {
    std::uint32_t amax = 0;
    for (int i = 0; i < count; ++i) amax = (x[i] & magnitude_bits) > amax ? (x[i] & magnitude_bits) : amax;
    const std::uint8_t scale = amax >= infinity_bits ? nan_scale : block_scale(product(amax, g));
    if (scale == 0 || scale == nan_scale) {
        for (int i = 0; i < count; ++i) codes[i] = 0;
        return scale;
    }
    const Midpoints middle = midpoints(scale);
    for (int i = 0; i < count; ++i) codes[i] = code(x[i], product(x[i] & magnitude_bits, g), middle);
    return scale;
}

// The g that fills the range for a greatest finite magnitude: 2688 / amax, rounded once to fp32 (on a GPU __fdiv_rn),
// at most the greatest finite number. 1 for amax = 0.
FP4LINEAR_HOST_DEVICE constexpr float global_scale_for(float amax) {
    if (amax == 0.0f) return 1.0f;
    constexpr float greatest = 0x1.fffffep127f;
    return amax < greatest_product / greatest ? greatest : greatest_product / amax;
}

}  // namespace fp4linear::activation
