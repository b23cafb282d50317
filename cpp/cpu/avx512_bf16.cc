// The kernels for AVX-512 with bf16 dot products (Zen 4 and 5, Cooper Lake, Sapphire Rapids and later).
// bf16 x is one term. fp16 x is the exact sum of two bf16 terms: two dot products give what two FMAs give, but the
// decode is cheaper, so that one row takes 0.85 of the time of FMAs (eight rows take 1.08 of it; Zen 4). fp32 x would
// need three terms: there FMAs are the faster way throughout.
#include "cpu/gemm_bf16.h"
#include "cpu/gemm_fma.h"
#include "cpu/gemv_bf16.h"
#include "cpu/gemv_fma.h"
#include "cpu/rows.h"
#include "cpu/simd_avx512.h"

namespace fp4linear::cpu {
namespace {

constexpr int gemv_rows = 8;
constexpr int gemm_rows = 13;
constexpr int gemm_tiles = 2;

void gemv_tile(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, Operand operand,
               int rows, float* sums) {
    __atomic_store_n(&last_kernels_name, avx512_bf16_kernels.name, __ATOMIC_RELAXED);
    const auto kernel = !operand.pairs()      ? gemv_fma_rows<SimdAvx512, gemv_rows>
                        : operand.planes == 1 ? gemv_bf16_rows<1, gemv_rows>
                                              : gemv_bf16_rows<2, gemv_rows>;
    kernel(tile, steps, plain_scales, x, rows, sums);
}

// bf16 pairs [k/2][16][2] of scaled weights, exact: six significant bits at most.
template <int j = 0>
inline void decode_pairs_of(__m512i codes, __m512 scale, unsigned char* panel) {
    if constexpr (j < 4) {
        __m512 even;
        __m512 odd;
        SimdAvx512::weights<j>(codes, even, odd);
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(_mm512_mul_ps(even, scale)), 16);
        const __m512i high = _mm512_castps_si512(_mm512_mul_ps(odd, scale));
        // 0xEC: low | (high & mask)
        constexpr int merge = 0xEC;
        const __m512i pairs =
            _mm512_ternarylogic_epi32(high, low, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)), merge);
        _mm512_store_si512(panel + 64 * j, pairs);
        decode_pairs_of<j + 1>(codes, scale, panel);
    }
}

void decode_pairs(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, unsigned char* panel) {
    for (std::int64_t s = 0; s < steps; ++s, tile += step_bytes) {
        __m512 scale[step_groups];
        decode_scales(tile + step_code_bytes, plain_scales, scale);
        for (int v = 0; v < step_k / 8; ++v, panel += 256) {
            decode_pairs_of(_mm512_load_si512(tile + 64 * v), scale[v / 2], panel);
        }
    }
}

void decode(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, bool pairs, void* panel) {
    if (pairs) {
        decode_pairs(tile, steps, plain_scales, static_cast<unsigned char*>(panel));
    } else {
        decode_fp32<SimdAvx512>(tile, steps, plain_scales, static_cast<float*>(panel));
    }
}

template <int tiles>
void gemm_block_tiles(const void* x, Operand operand, int rows, const void* panel, std::int64_t panel_stride,
                      std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride) {
    const auto block = !operand.pairs()      ? gemm_fma_rows<SimdAvx512, tiles, gemm_rows>
                       : operand.planes == 1 ? gemm_bf16_rows<1, tiles, gemm_rows>
                                             : gemm_bf16_rows<2, tiles, gemm_rows>;
    block(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
}

void gemm_block(const void* x, Operand operand, int rows, const void* panel, std::int64_t panel_stride, int tiles,
                std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride) {
    __atomic_store_n(&last_kernels_name, avx512_bf16_kernels.name, __ATOMIC_RELAXED);
    const auto block = tiles == 1 ? gemm_block_tiles<1> : gemm_block_tiles<gemm_tiles>;
    block(x, operand, rows, panel, panel_stride, k, accumulate, sums, row_stride);
}

}  // namespace

constinit const KernelTable avx512_bf16_kernels = {
    .name = "avx512_bf16",
    .gemv_operand = {bf16_terms(2), bf16_terms(1), fp32_operand},  // float16, bfloat16, float32
    .gemm_operand = {bf16_terms(2), bf16_terms(1), fp32_operand},
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
