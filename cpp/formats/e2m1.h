// E2M1, the 4-bit element of NVFP4 (OCP Microscaling Formats v1.0, section 5.3.3): sign, two exponent
// bits, one mantissa bit; no infinity and no NaN. Two codes a byte, the low nibble first.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

namespace fp4linear {

inline constexpr std::array<float, 16> e2m1_values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

constexpr float float_from_e2m1(std::uint8_t code) { return e2m1_values[code & 0xF]; }

// Nearest code, ties to the even one, saturating at +-6. NaN has no code: it becomes +-6, as the
// hardware conversion does (cvt.rn.satfinite.e2m1x2).
constexpr std::uint8_t e2m1_from_float(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint8_t>((bits >> 28) & 0x8u);
    const float a = std::bit_cast<float>(bits & 0x7FFFFFFFu);
    // Midpoints; a tie goes to the code with an even mantissa bit.
    if (a <= 0.25f) return sign | 0;
    if (a < 0.75f) return sign | 1;
    if (a <= 1.25f) return sign | 2;
    if (a < 1.75f) return sign | 3;
    if (a <= 2.5f) return sign | 4;
    if (a < 3.5f) return sign | 5;
    if (a <= 5.0f) return sign | 6;
    return sign | 7;
}

constexpr std::uint8_t pack_e2m1(std::uint8_t even_k, std::uint8_t odd_k) {
    return static_cast<std::uint8_t>((even_k & 0xFu) | (odd_k << 4));
}
constexpr std::uint8_t e2m1_code(const std::uint8_t* row, std::int64_t k) {
    return (k & 1) ? row[k >> 1] >> 4 : row[k >> 1] & 0xF;
}

}  // namespace fp4linear
