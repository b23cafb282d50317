// E2M1 codes to fp16 by shift and mask. The toolkit's own conversion is emulated with ~25 instructions a code on
// devices before 10.0.
#pragma once
#include <cuda_fp16.h>

#include <cstdint>

namespace fp4linear::cuda {

// Two codes, in bits 0..3 and 16..19 of the word (other bits are ignored), to two halves. The sign goes to the sign
// bit and the other three bits to the two low exponent bits and the top mantissa bit, which reads as the value times
// 2^(1 - 15), subnormal for code 1; the multiplication is exact.
__device__ __forceinline__ __half2 half2_from_e2m1(std::uint32_t codes) {
    const std::uint32_t bits = ((codes & 0x00080008u) << 12) | ((codes & 0x00070007u) << 9);
    __half2 tiny;
    *reinterpret_cast<std::uint32_t*>(&tiny) = bits;
    return __hmul2(tiny, __half2half2(__ushort_as_half(0x7400)));  // 2^14
}

// One byte: the low nibble to .x (even k), the high nibble to .y (odd k).
__device__ __forceinline__ __half2 half2_from_e2m1_byte(std::uint32_t byte) {
    return half2_from_e2m1((byte & 0x0Fu) | ((byte & 0xF0u) << 12));
}

}  // namespace fp4linear::cuda
