// Decoding of prepacked codes and scales into mma operands, for each activation type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma nv_diag_suppress 177  // nothing uses the helpers of a kernel that has no body before SM80
#endif

namespace fp4linear::cuda::device {

__device__ __forceinline__ float bits_to_float(std::uint32_t bits) { return __uint_as_float(bits); }

// bf16. A code's magnitude bits in bits 8-6 are code * 2^-126: 0.5 and 0 come out right as the subnormals they are.
struct BFloat16 {
    using Storage = __nv_bfloat16;
    static constexpr int code_exponent = -126;

    __device__ static __forceinline__ void decode(std::uint32_t word, std::uint32_t (&a)[4]) {
        constexpr std::uint32_t mask = 0x81C081C0u;
        a[0] = word & mask;
        a[1] = (word << 3) & mask;
        a[2] = ((word & 0x40074007u) * 0x42u) & mask;
        a[3] = (((word >> 3) & 0x05C005C0u) * 0x21u) & mask;
    }
    // A scale's 7 magnitude bits in bits 10-4 are scale * 2^-120, subnormals included. Two multiplies make it
    // scale * 2^119, the largest power that keeps 480 finite: code * scale becomes w * 2^-7, in the normal range.
    static constexpr int weight_exponent = -7;
    __device__ static __forceinline__ std::uint32_t scale_pair(std::uint32_t bytes, int h) {
        const std::uint32_t placed = (h == 0 ? bytes << 4 : bytes >> 4) & 0x07F007F0u;
        return multiply(multiply(placed, 0x7F007F00u /* 2^127 */), 0x77807780u /* 2^112 */);
    }
    __device__ static __forceinline__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
        const __nv_bfloat162 product =
            __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
        return reinterpret_cast<const std::uint32_t&>(product);
    }
    __device__ static __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                               std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    __device__ static __forceinline__ float to_float(std::uint16_t bits) {
        return __uint_as_float(std::uint32_t{bits} << 16);
    }
    __device__ static __forceinline__ std::uint16_t from_float(float v) {
        return __bfloat16_as_ushort(__float2bfloat16_rn(v));
    }
    // One rounding, to nearest even. A double goes through a float rounded to odd, which keeps the second rounding
    // right.
    __device__ static __forceinline__ std::uint16_t from_double(double v) {
        const float down = __double2float_rz(v);
        std::uint32_t bits = __float_as_uint(down);
        if (static_cast<double>(down) != v && v == v) bits |= 1u;
        return __bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(bits)));
    }
};

// fp16. Magnitude bits in bits 11-9 are code * 2^-14; scales are exact as they are, so w * 2^-14 is a multiple of
// 2^-24, exact.
struct Float16 {
    using Storage = __half;
    static constexpr int code_exponent = -14;

    __device__ static __forceinline__ void decode(std::uint32_t word, std::uint32_t (&a)[4]) {
        constexpr std::uint32_t mask = 0x8E008E00u;
        a[0] = ((word & 0x81C081C0u) * 0x9u) & mask;
        a[1] = ((word & 0x10381038u) * 0x48u) & mask;
        a[2] = ((word & 0x40074007u) * 0x202u) & mask;
        a[3] = (((word << 2) & 0x80008000u) | (word & ~0x80008000u)) & mask;
    }
    static constexpr int weight_exponent = -14;
    __device__ static __forceinline__ std::uint32_t scale_pair(std::uint32_t bytes, int h) {
        const std::uint32_t placed = (h == 0 ? bytes << 7 : bytes >> 1) & 0x3F803F80u;  // scale * 2^-8
        return multiply(placed, 0x5C005C00u /* 2^8 */);
    }
    __device__ static __forceinline__ std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
        const __half2 product = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
        return reinterpret_cast<const std::uint32_t&>(product);
    }
    __device__ static __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                               std::uint32_t b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
    __device__ static __forceinline__ float to_float(std::uint16_t bits) {
        return __half2float(__ushort_as_half(bits));
    }
    __device__ static __forceinline__ std::uint16_t from_float(float v) { return __half_as_ushort(__float2half_rn(v)); }
    __device__ static __forceinline__ std::uint16_t from_double(double v) {
        const float down = __double2float_rz(v);
        std::uint32_t bits = __float_as_uint(down);
        if (static_cast<double>(down) != v && v == v) bits |= 1u;
        return __half_as_ushort(__float2half_rn(__uint_as_float(bits)));
    }
};

// Both halves of one half of a pair: an operand modifier of HMUL2, no instruction.
__device__ __forceinline__ std::uint32_t twice(std::uint32_t pair, bool high) {
    std::uint32_t v;
    if (high)
        asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {h, h};\n}" : "=r"(v) : "r"(pair));
    else
        asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %1;\n mov.b32 %0, {l, l};\n}" : "=r"(v) : "r"(pair));
    return v;
}

__device__ __forceinline__ float float_from_code(std::uint32_t code) {
    const std::uint32_t magnitude = code & 7u;
    const float value =
        magnitude < 2 ? 0.5f * static_cast<float>(magnitude) : __uint_as_float((magnitude + 252u) << 22);
    return (code & 8u) != 0 ? -value : value;
}

// E4M3 magnitude of the byte at `byte` of a word, * 2^-120 (exact as a float, subnormals included).
__device__ __forceinline__ float scale_magnitude(std::uint32_t word, int byte) {
    const std::uint32_t placed = byte == 3 ? word >> 4 : word << (20 - 8 * byte);
    return __uint_as_float(placed & 0x07F00000u);
}

}  // namespace fp4linear::cuda::device
