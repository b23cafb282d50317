// Words of 32 bits as the device's instructions see them, and the same for host tests of device code.
#pragma once
#include <cstdint>

#include "formats/activation.h"  // FP4LINEAR_HOST_DEVICE

#ifndef __CUDA_ARCH__
#include <bit>
#endif

namespace fp4linear::cuda::words {

FP4LINEAR_HOST_DEVICE inline float float_of_bits(std::uint32_t bits) {
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    return std::bit_cast<float>(bits);
#endif
}
FP4LINEAR_HOST_DEVICE inline std::uint32_t bits_of_float(float value) {
#ifdef __CUDA_ARCH__
    return __float_as_uint(value);
#else
    return std::bit_cast<std::uint32_t>(value);
#endif
}

// Byte i of the result is byte (selector >> 4i) & 7 of (high, low).
FP4LINEAR_HOST_DEVICE inline std::uint32_t permute(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, selector);
#else
    const std::uint64_t both = std::uint64_t{high} << 32 | low;
    std::uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<std::uint32_t>(both >> 8 * ((selector >> 4 * i) & 7u) & 0xFFu) << 8 * i;
    return result;
#endif
}

}  // namespace fp4linear::cuda::words
