// Simd of gemv_fma.h and gemm_fma.h for AVX-512 (F, BW, VL, DQ).
#pragma once
#include <immintrin.h>

#include "cpu/scales_avx512.h"

namespace fp4linear::cpu {
namespace {

// The 16 values of E2M1 as bf16, twice: a lookup of 16-bit words reads five bits, of which the fifth belongs to the
// next code.
alignas(64) constexpr std::uint16_t bf16_table[32] = {0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                                      0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0,
                                                      0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,
                                                      0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

struct SimdAvx512 {
    static constexpr int lanes = 16;
    static constexpr int side = 4;
    using Float = __m512;
    using Codes = __m512i;
    static Float zero() { return _mm512_setzero_ps(); }
    static Float load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, Float value) { _mm512_storeu_ps(at, value); }
    static Float broadcast(const float* at) { return _mm512_set1_ps(*at); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Codes load_codes(const std::uint8_t* at) { return _mm512_load_si512(at); }
    // One lookup gives both weights as bf16, and bf16 is the upper half of fp32: that is one operation of the shuffle
    // pipe less than two lookups of 32-bit lanes.
    template <int j>
    static void weights(Codes codes, Float& even, Float& odd) {
        const __m512i pairs =
            _mm512_permutexvar_epi16(j == 0 ? codes : _mm512_srli_epi16(codes, 4 * j), _mm512_load_si512(bf16_table));
        even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
        odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
    }
    static void decode_scales(const std::uint8_t* bytes, bool plain, int /*first_row*/, Float* scale) {
        cpu::decode_scales(bytes, plain, scale);
    }
};

}  // namespace
}  // namespace fp4linear::cpu
