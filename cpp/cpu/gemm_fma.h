// Block kernel of the GEMM with fp32 FMAs, and the decode of its panels. Simd is the one of gemv_fma.h, with load and
// mul. Accumulators: rows x tiles x 16 columns; chosen by each set so that they fill its registers.
#pragma once
#include "cpu/kernels.h"

namespace fp4linear::cpu {
namespace {

template <class Simd, int rows, int tiles>
void gemm_fma(const void* x_packed, const void* panel, std::int64_t panel_stride, std::int64_t k, bool accumulate,
              float* sums, std::int64_t row_stride) {
    using Float = typename Simd::Float;
    constexpr int parts = tile_rows / Simd::lanes;
    const auto* x = static_cast<const float*>(x_packed);
    const auto* weights = static_cast<const unsigned char*>(panel);
    Float sum[rows][tiles * parts];
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) {
        FP4LINEAR_UNROLL
        for (int v = 0; v < tiles * parts; ++v) {
            sum[r][v] = accumulate ? Simd::load(sums + r * row_stride + v * Simd::lanes) : Simd::zero();
        }
    }
    for (std::int64_t i = 0; i < k; ++i) {
        Float w[tiles * parts];
        FP4LINEAR_UNROLL
        for (int v = 0; v < tiles * parts; ++v) {
            w[v] = Simd::load(reinterpret_cast<const float*>(weights + v / parts * panel_stride) +
                              v % parts * Simd::lanes);
        }
        FP4LINEAR_UNROLL
        for (int r = 0; r < rows; ++r) {
            const Float broadcast = Simd::broadcast(x + r);
            FP4LINEAR_UNROLL
            for (int v = 0; v < tiles * parts; ++v) sum[r][v] = Simd::fma(w[v], broadcast, sum[r][v]);
        }
        weights += tile_rows * sizeof(float);
        x += rows;
    }
    FP4LINEAR_UNROLL
    for (int r = 0; r < rows; ++r) {
        FP4LINEAR_UNROLL
        for (int v = 0; v < tiles * parts; ++v) Simd::store(sums + r * row_stride + v * Simd::lanes, sum[r][v]);
    }
}

template <class Simd, int tiles, int most>
void gemm_fma_rows(const void* x, int rows, const void* panel, std::int64_t panel_stride, std::int64_t k,
                   bool accumulate, float* sums, std::int64_t row_stride) {
    if (rows == most) {
        gemm_fma<Simd, most, tiles>(x, panel, panel_stride, k, accumulate, sums, row_stride);
    } else if constexpr (most > 1) {
        gemm_fma_rows<Simd, tiles, most - 1>(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
    }
}

template <class Simd, int j = 0>
inline void decode_codes(typename Simd::Codes codes, typename Simd::Float scale, float* out) {
    if constexpr (j < 4) {
        typename Simd::Float even;
        typename Simd::Float odd;
        Simd::template weights<j>(codes, even, odd);
        Simd::store(out + 2 * j * tile_rows, Simd::mul(even, scale));
        Simd::store(out + (2 * j + 1) * tile_rows, Simd::mul(odd, scale));
        decode_codes<Simd, j + 1>(codes, scale, out);
    }
}

// fp32 panel [k][16] of scaled weights.
template <class Simd>
void decode_fp32(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, float* panel) {
    for (std::int64_t s = 0; s < steps; ++s, tile += step_bytes, panel += step_k * tile_rows) {
        for (int row = 0; row < tile_rows; row += Simd::lanes) {
            typename Simd::Float scale[step_groups];
            Simd::decode_scales(tile + step_code_bytes, plain_scales, row, scale);
            for (int v = 0; v < step_k / 8; ++v) {
                decode_codes<Simd>(Simd::load_codes(tile + 64 * v + 4 * row), scale[v / 2],
                                   panel + 8 * v * tile_rows + row);
            }
        }
    }
}

}  // namespace
}  // namespace fp4linear::cpu
