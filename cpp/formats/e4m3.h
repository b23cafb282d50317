// E4M3 (float8_e4m3fn, OCP 8-bit Floating Point Specification v1.0): bias 7, greatest 448, no infinity,
// 0x7F and 0xFF are NaN. The block scale of NVFP4.
#pragma once
#include <array>
#include <bit>
#include <cstdint>
#include <limits>

namespace fp4linear {

constexpr bool is_e4m3_nan(std::uint8_t byte) { return (byte & 0x7F) == 0x7F; }

constexpr float float_from_e4m3(std::uint8_t byte) {
    const std::uint32_t sign = static_cast<std::uint32_t>(byte & 0x80) << 24;
    const std::uint32_t exponent = (byte >> 3) & 0xF;
    const std::uint32_t mantissa = byte & 0x7;
    float magnitude = 0.0f;
    if (is_e4m3_nan(byte)) {
        magnitude = std::numeric_limits<float>::quiet_NaN();
    } else if (exponent == 0) {
        magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    } else {
        magnitude = std::bit_cast<float>(((exponent + 120) << 23) | (mantissa << 20));
    }
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
}

inline constexpr std::array<float, 256> e4m3_values = [] {
    std::array<float, 256> table{};
    for (int byte = 0; byte < 256; ++byte) table[byte] = float_from_e4m3(static_cast<std::uint8_t>(byte));
    return table;
}();

// Nearest E4M3, ties to even, saturating at +-448; NaN stays NaN.
constexpr std::uint8_t e4m3_from_float(float value) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    const auto sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
    const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7F;
    if (magnitude >= 0x43E00000u) return sign | 0x7E;  // >= 448
    if (magnitude < 0x3C800000u) {                     // below 2^-6: subnormals, spacing 2^-9
        // Adding 2^14 puts the ulp of the sum at 2^-9, so the addition rounds to nearest even.
        const float rounded = std::bit_cast<float>(magnitude) + 0x1p14f;
        return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(rounded) - 0x46800000u));
    }
    const std::uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
    const std::uint32_t code = (rounded - 0x3C000000u) >> 20;
    return static_cast<std::uint8_t>(sign | (code > 0x7E ? 0x7E : code));
}

}  // namespace fp4linear
