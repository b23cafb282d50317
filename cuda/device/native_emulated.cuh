// The arithmetic of native_emulated's kernel, for the device and for host tests: the bits of cpu/native.cc.
//
// Codes become integers, twice their values, so that a block's 16 products are four dp4a and exact. Their sum starts at
// the bits of a float whose last place is 1 and is read as a float: no conversion from int. Both scales are exact as
// one fp32 factor, and what a block adds has at most 20 bits: one fma a block rounds as the addition alone would.
#pragma once
#include <cstdint>

#include "cuda/device/words.cuh"
#include "formats/activation.h"

#ifndef __CUDA_ARCH__
#include <cmath>
#endif

namespace fp4linear::cuda::emulated {

inline constexpr int block_size = activation::block_size;
inline constexpr int words_of_block = block_size / 4;  // of 32 bits, four integers each
inline constexpr float product_unit = 0.25f;           // of a product of two doubled values

// Four codes, in the low 16 bits, to the signed bytes of twice their values, in order.
FP4LINEAR_HOST_DEVICE inline std::uint32_t doubled(std::uint32_t codes) {
    const std::uint32_t magnitudes = codes & 0x7777u;
    const std::uint32_t positive = words::permute(0x03020100u, 0x0C080604u, magnitudes);
    const std::uint32_t negative = words::permute(0xFDFEFF00u, 0xF4F8FAFCu, magnitudes);
    const std::uint32_t mask = words::permute(0x0000FF00u, 0, codes >> 3 & 0x1111u);
    return (negative & mask) | (positive & ~mask);
}

// Four products of signed bytes, added.
FP4LINEAR_HOST_DEVICE inline std::int32_t multiply_add(std::uint32_t a, std::uint32_t b, std::int32_t sum) {
#ifdef __CUDA_ARCH__
    return __dp4a(static_cast<int>(a), static_cast<int>(b), sum);
#else
    for (int i = 0; i < 4; ++i)
        sum += static_cast<std::int8_t>(a >> 8 * i & 0xFFu) * static_cast<std::int8_t>(b >> 8 * i & 0xFFu);
    return sum;
#endif
}

inline constexpr std::int32_t unit_bits = 0x4B400000;  // of 1.5 * 2^23, whose last place is 1
inline constexpr float unit_value = 12582912.0f;

FP4LINEAR_HOST_DEVICE inline float from_unit_bits(std::int32_t bits) {
    return words::float_of_bits(static_cast<std::uint32_t>(bits)) - unit_value;
}

// An E4M3 byte of x or of the weight; NaN for 0x7F and 0xFF.
FP4LINEAR_HOST_DEVICE inline float scale_value(std::uint8_t byte) {
    const std::uint32_t magnitude = byte & 0x7Fu;
    const std::uint32_t exponent = magnitude >> 3;
    const float subnormal = static_cast<float>(magnitude) * 0x1p-9f;
    const std::uint32_t bits = magnitude == 0x7F ? 0x7FC00000u : (magnitude + (120u << 3)) << 20;
    const float value = exponent == 0 ? subnormal : words::float_of_bits(bits);
    return (byte & 0x80u) != 0 ? -value : value;
}

// sum and what one block adds to it. The scale of the weight comes times product_unit.
FP4LINEAR_HOST_DEVICE inline float add_block(const std::uint32_t (&x)[words_of_block],
                                             const std::uint32_t (&weight)[words_of_block], float x_scale,
                                             float weight_scale, float sum) {
    std::int32_t products = unit_bits;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < words_of_block; ++i) products = multiply_add(x[i], weight[i], products);
#ifdef __CUDA_ARCH__
    return __fmaf_rn(from_unit_bits(products), x_scale * weight_scale, sum);
#else
    return std::fma(from_unit_bits(products), x_scale * weight_scale, sum);
#endif
}

// y before its rounding to fp32 and then to its type, in fp64 as the CPU's: the product is exact, and scale2 / g is
// never rounded to fp32 nor overflows.
FP4LINEAR_HOST_DEVICE inline double finish(float sum, float scale2, float global_scale, const float* bias) {
    double value = static_cast<double>(sum) * static_cast<double>(scale2) / static_cast<double>(global_scale);
    if (bias != nullptr) value += static_cast<double>(*bias);
    return value;
}

}  // namespace fp4linear::cuda::emulated
