// Block kernel of the GEMM with bf16 dot products: up to 13 rows of x times 32 output columns.
//
// 26 accumulators, two panel vectors (bf16 pairs of 16 columns each), one broadcast pair of x: 15 loads for 26
// vdpbf16ps, so the dot pipe is the bound. x is packed so that the pairs of the 13 rows are consecutive.
#pragma once
#include <immintrin.h>

#include "cpu/kernels.h"

namespace fp4linear::cpu {
namespace {

template <int planes, int rows, int tiles>
void gemm_bf16(const void* x_packed, const void* panel, std::int64_t panel_stride, std::int64_t k, bool accumulate,
               float* sums, std::int64_t row_stride) {
    const auto* x = static_cast<const std::int32_t*>(x_packed);
    const auto* weights = static_cast<const unsigned char*>(panel);
    __m512 sum[rows][tiles];
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) {
        FP4LINEAR_UNROLL
        for (int t = 0; t < tiles; ++t) {
            sum[r][t] = accumulate ? _mm512_loadu_ps(sums + r * row_stride + t * tile_rows) : _mm512_setzero_ps();
        }
    }
    for (std::int64_t pair = 0; pair < k / 2; ++pair) {
        __m512bh w[tiles];
        FP4LINEAR_UNROLL
        for (int t = 0; t < tiles; ++t) w[t] = (__m512bh)_mm512_load_si512(weights + t * panel_stride);
        FP4LINEAR_UNROLL
        for (int p = 0; p < planes; ++p) {
            FP4LINEAR_UNROLL
            for (int r = 0; r < rows; ++r) {
                const __m512bh broadcast = (__m512bh)_mm512_set1_epi32(x[p * rows + r]);
                FP4LINEAR_UNROLL
                for (int t = 0; t < tiles; ++t) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], w[t], broadcast);
            }
        }
        weights += 64;
        x += planes * rows;
    }
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) {
        FP4LINEAR_UNROLL
        for (int t = 0; t < tiles; ++t) _mm512_storeu_ps(sums + r * row_stride + t * tile_rows, sum[r][t]);
    }
}

template <int planes, int tiles, int most>
void gemm_bf16_rows(const void* x, int rows, const void* panel, std::int64_t panel_stride, std::int64_t k,
                    bool accumulate, float* sums, std::int64_t row_stride) {
    if (rows == most) {
        gemm_bf16<planes, most, tiles>(x, panel, panel_stride, k, accumulate, sums, row_stride);
    } else if constexpr (most > 1) {
        gemm_bf16_rows<planes, tiles, most - 1>(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
    }
}

}  // namespace
}  // namespace fp4linear::cpu
