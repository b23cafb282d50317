// Decode kernel with bf16 dot products (AVX512_BF16): 16 output rows, one a lane, times 1..8 rows of x.
//
//   code vector, 32-bit lane r:   [k+1 k+3 k+5 k+7 | k  k+2 k+4 k+6]   nibbles, row r
//   >> 4j, 16-bit table lookup:   [ w[r,k+2j+1]    |  w[r,k+2j]    ]   bf16 pair
//   vdpbf16ps with a broadcast pair of x adds two products to lane r: no shuffles, no horizontal sums.
//
// The sum of a group of 16 k meets its scale in one FMA. A row's order of additions is the same for any number of
// rows: per group the pairs in order of k (terms of x innermost), then the groups in order.
// What bounds it on Zen 4 (512-bit operations take two passes through 256-bit pipes): one row is bound by the shuffle
// and dot pipes together, eight rows by the dot pipe.
#pragma once
#include <immintrin.h>

#include "cpu/kernels.h"
#include "cpu/simd_avx512.h"

namespace fp4linear::cpu {
namespace {

constexpr std::int64_t gemv_prefetch_bytes = 16 * step_bytes;  // on Zen 4 with cold weights 4 to 64 are alike

// The vector whose 16-bit words have nibble j of the codes in their low four bits.
template <int rows>
inline __m512i index_of(int j, __m512i codes, const std::uint8_t* at) {
    if (j == 0) return codes;
    // A load one byte on does what a shift by 8 does, without the shuffle pipe: it pays where the dot products already
    // fill the other one, and costs where the loads of few rows are on the critical path.
    if (j == 2 && rows >= 4) return _mm512_loadu_si512(at + 1);
    return _mm512_srli_epi16(codes, 4 * j);
}

template <int planes, int rows>
void gemv_bf16(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x_staged, float* sums) {
    const __m512i table = _mm512_load_si512(bf16_table);
    const auto* x = static_cast<const unsigned char*>(x_staged);
    // Groups whose chains of dot products run side by side: their latency (6 cycles) must be hidden.
    constexpr int side = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    __m512 sum[rows];
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) sum[r] = _mm512_setzero_ps();
    for (std::int64_t s = 0; s < steps; ++s) {
        for (int line = 0; line < step_bytes; line += 64) {
            _mm_prefetch(reinterpret_cast<const char*>(tile + gemv_prefetch_bytes + line), _MM_HINT_T0);
        }
        __m512 scale[step_groups];
        decode_scales(tile + step_code_bytes, plain_scales, scale);
        FP4LINEAR_UNROLL
        for (int first = 0; first < step_groups; first += side) {
            __m512 group[side][rows];
            FP4LINEAR_UNROLL
            for (int g = 0; g < side; ++g) {
                FP4LINEAR_UNROLL
                for (int r = 0; r < rows; ++r) group[g][r] = _mm512_setzero_ps();
            }
            FP4LINEAR_UNROLL
            for (int half = 0; half < 2; ++half) {
                __m512i codes[side];
                FP4LINEAR_UNROLL
                for (int g = 0; g < side; ++g) {
                    codes[g] = _mm512_load_si512(tile + 64 * (2 * (first + g) + half));
                }
                FP4LINEAR_UNROLL
                for (int j = 0; j < 4; ++j) {
                    FP4LINEAR_UNROLL
                    for (int g = 0; g < side; ++g) {
                        const __m512i index = index_of<rows>(j, codes[g], tile + 64 * (2 * (first + g) + half));
                        const __m512i weights = _mm512_permutexvar_epi16(index, table);
                        const int k = group_k * (first + g) + 8 * half + 2 * j;
                        FP4LINEAR_UNROLL
                        for (int r = 0; r < rows; ++r) {
                            FP4LINEAR_UNROLL
                            for (int p = 0; p < planes; ++p) {
                                std::int32_t pair;
                                __builtin_memcpy(&pair, x + 2 * ((r * planes + p) * step_k + k), sizeof(pair));
                                group[g][r] =
                                    _mm512_dpbf16_ps(group[g][r], (__m512bh)weights, (__m512bh)_mm512_set1_epi32(pair));
                            }
                        }
                    }
                }
            }
            FP4LINEAR_UNROLL
            for (int g = 0; g < side; ++g) {
                FP4LINEAR_UNROLL
                for (int r = 0; r < rows; ++r) sum[r] = _mm512_fmadd_ps(group[g][r], scale[first + g], sum[r]);
            }
        }
        tile += step_bytes;
        x += rows * planes * step_k * 2;
    }
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) _mm512_storeu_ps(sums + r * tile_rows, sum[r]);
}

// The kernel for a row count known at run time.
template <int planes, int most>
void gemv_bf16_rows(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, int rows,
                    float* sums) {
    if (rows == most) {
        gemv_bf16<planes, most>(tile, steps, plain_scales, x, sums);
    } else if constexpr (most > 1) {
        gemv_bf16_rows<planes, most - 1>(tile, steps, plain_scales, x, rows, sums);
    }
}

}  // namespace
}  // namespace fp4linear::cpu
