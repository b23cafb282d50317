// The kernels for AVX2 with FMA and F16C (Haswell, Zen and later).
#include <immintrin.h>

#include "cpu/gemm_fma.h"
#include "cpu/gemv_fma.h"
#include "cpu/rows.h"

namespace fp4linear::cpu {
namespace {

alignas(32) constexpr float magnitude_table[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

struct SimdAvx2 {
    static constexpr int lanes = 8;
    static constexpr int side = 4;
    using Float = __m256;
    using Codes = __m256i;
    static Float zero() { return _mm256_setzero_ps(); }
    static Float load(const float* at) { return _mm256_loadu_ps(at); }
    static void store(float* at, Float value) { _mm256_storeu_ps(at, value); }
    static Float broadcast(const float* at) { return _mm256_broadcast_ss(at); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Codes load_codes(const std::uint8_t* at) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(at)); }
    // The lookup reads three bits, the magnitude; the fourth goes to the sign.
    template <int shift>
    static Float nibble(Codes codes) {
        const __m256i index = shift == 0 ? codes : _mm256_srli_epi32(codes, shift);
        const __m256i sign = _mm256_and_si256(shift == 28 ? codes : _mm256_slli_epi32(codes, 28 - shift),
                                              _mm256_set1_epi32(static_cast<int>(0x80000000u)));
        return _mm256_or_ps(_mm256_permutevar8x32_ps(_mm256_load_ps(magnitude_table), index),
                            _mm256_castsi256_ps(sign));
    }
    template <int j>
    static void weights(Codes codes, Float& even, Float& odd) {
        even = nibble<4 * j>(codes);
        odd = nibble<16 + 4 * j>(codes);
    }
    // Eight rows of the words of scales_avx512.h, which explains the bits.
    static Float widen(__m128i words, __m128i halves, int shift_sign, bool plain) {
        if (!plain) {
            const __m128i sign =
                _mm_and_si128(_mm_slli_epi16(words, shift_sign), _mm_set1_epi16(static_cast<short>(0x8000)));
            const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(halves, _mm_set1_epi16(0x3F80)), _mm_set1_epi16(0x7E00));
            halves = _mm_or_si128(_mm_or_si128(halves, sign), nan);
        }
        return _mm256_cvtph_ps(halves);
    }
    static void decode_scales(const std::uint8_t* bytes, bool plain, int first_row, Float* scale) {
        const __m128i field = _mm_set1_epi16(0x3F80);
        for (int h = 0; h < 2; ++h) {
            const __m128i words =
                _mm_load_si128(reinterpret_cast<const __m128i*>(bytes + 2 * tile_rows * h + 2 * first_row));
            scale[2 * h] = widen(words, _mm_and_si128(_mm_slli_epi16(words, 7), field), 8, plain);
            scale[2 * h + 1] = widen(words, _mm_and_si128(_mm_srli_epi16(words, 1), field), 0, plain);
        }
    }
};

constexpr int gemv_rows = 4;
constexpr int gemm_rows = 6;
constexpr int gemm_tiles = 1;

void gemv_tile(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, Operand /*operand*/,
               int rows, float* sums) {
    __atomic_store_n(&last_kernels_name, avx2_kernels.name, __ATOMIC_RELAXED);
    gemv_fma_rows<SimdAvx2, gemv_rows>(tile, steps, plain_scales, x, rows, sums);
}

void decode(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, bool /*pairs*/, void* panel) {
    decode_fp32<SimdAvx2>(tile, steps, plain_scales, static_cast<float*>(panel));
}

void gemm_block(const void* x, Operand /*operand*/, int rows, const void* panel, std::int64_t panel_stride,
                int /*tiles*/, std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride) {
    __atomic_store_n(&last_kernels_name, avx2_kernels.name, __ATOMIC_RELAXED);
    gemm_fma_rows<SimdAvx2, gemm_tiles, gemm_rows>(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
}

}  // namespace

constinit const KernelTable avx2_kernels = {
    .name = "avx2",
    .gemv_operand = {fp32_operand, fp32_operand, fp32_operand},
    .gemm_operand = {fp32_operand, fp32_operand, fp32_operand},
    .gemv_rows = gemv_rows,
    .gemm_rows = gemm_rows,
    .gemm_tiles = gemm_tiles,
    .scan = scan_row,
    .pack_gemv = pack_gemv_row,
    .pack_gemm = pack_gemm_row,
    .gemv_tile = gemv_tile,
    .decode = decode,
    .gemm_block = gemm_block,
    .finish = finish_row,
};

}  // namespace fp4linear::cpu
