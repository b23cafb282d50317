// Simd of gemv_fma.h and gemm_fma.h for AVX-512 (F, BW, VL, DQ).
#pragma once
#include <immintrin.h>

#include "cpu/scales_avx512.h"

namespace fp4linear::cpu {
namespace {

alignas(64) constexpr float fp32_table[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                              -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct SimdAvx512 {
    static constexpr int lanes = 16;
    using Float = __m512;
    using Codes = __m512i;
    static Float zero() { return _mm512_setzero_ps(); }
    static Float load(const float* at) { return _mm512_loadu_ps(at); }
    static void store(float* at, Float value) { _mm512_storeu_ps(at, value); }
    static Float broadcast(const float* at) { return _mm512_set1_ps(*at); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Codes load_codes(const std::uint8_t* at) { return _mm512_load_si512(at); }
    // The lookup reads the low four bits of a lane.
    template <int shift>
    static Float weights(Codes codes) {
        return _mm512_permutexvar_ps(shift == 0 ? codes : _mm512_srli_epi32(codes, shift),
                                     _mm512_load_ps(fp32_table));
    }
    static void decode_scales(const std::uint8_t* bytes, bool plain, int /*first_row*/, Float* scale) {
        cpu::decode_scales(bytes, plain, scale);
    }
};

}  // namespace
}  // namespace fp4linear::cpu
