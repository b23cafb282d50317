// E4M3 bytes to fp16 by shift and mask, NaN and subnormals included.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace fp4linear::cuda {

// Exponent and mantissa move to the same places of a half, whose bias is 8 greater; 0x7F and 0xFF, which would read
// as 480, are NaN.
__device__ __forceinline__ __half half_from_e4m3(std::uint8_t byte) {
    const std::uint16_t sign = static_cast<std::uint16_t>((byte & 0x80u) << 8);
    const std::uint16_t magnitude = byte & 0x7Fu;
    if (magnitude == 0x7F) return __ushort_as_half(sign | 0x7E00u);
    const __half small = __ushort_as_half(static_cast<std::uint16_t>(sign | (magnitude << 7)));
    return __hmul(small, __ushort_as_half(0x5C00));  // 2^8
}

}  // namespace fp4linear::cuda
