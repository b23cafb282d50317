// Decode kernel with fp32 FMAs, for every set without bf16 dot products: 16 output rows, one a lane, times a few rows
// of x. The layout is the one of gemv_bf16.h; here they become fp32.
//
// Simd supplies: lanes, Float, Codes; zero, broadcast, fma, store; load_codes; weights<j>(codes, even, odd), the fp32
// weights of k = 2j and 2j + 1 of a code vector; decode_scales(bytes, plain, first_row, scale[4]).
// A row's order of additions is the same for any number of rows: per group in order of k, then the groups in order.
#pragma once
#include "cpu/kernels.h"

namespace fp4linear::cpu {
namespace {

// Adds pair j of a code vector of `side` groups to their sums of all rows; codes of the groups lie 128 bytes apart.
template <class Simd, int rows, int side, int j = 0>
inline void add_codes(const typename Simd::Codes* codes, const float* x, typename Simd::Float (*group)[rows]) {
    if constexpr (j < 4) {
        FP4LINEAR_UNROLL
        for (int g = 0; g < side; ++g) {
            typename Simd::Float even;
            typename Simd::Float odd;
            Simd::template weights<j>(codes[g], even, odd);
            FP4LINEAR_UNROLL
            for (int r = 0; r < rows; ++r) {
                const float* at = x + r * step_k + g * group_k + 2 * j;
                group[g][r] = Simd::fma(even, Simd::broadcast(at), group[g][r]);
                group[g][r] = Simd::fma(odd, Simd::broadcast(at + 1), group[g][r]);
            }
        }
        add_codes<Simd, rows, side, j + 1>(codes, x, group);
    }
}

template <class Simd, int rows>
void gemv_fma(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x_staged, float* sums) {
    using Float = typename Simd::Float;
    constexpr int parts = tile_rows / Simd::lanes;
    // Groups whose chains of FMAs run side by side, to hide the latency.
    constexpr int side = rows == 1 ? Simd::side : 1;
    constexpr std::int64_t prefetch_bytes = 16 * step_bytes;
    const auto* x = static_cast<const float*>(x_staged);
    Float sum[parts][rows];
    FP4LINEAR_UNROLL
    for (int part = 0; part < parts; ++part) {
        FP4LINEAR_UNROLL
        for (int r = 0; r < rows; ++r) sum[part][r] = Simd::zero();
    }
    for (std::int64_t s = 0; s < steps; ++s) {
        for (int line = 0; line < step_bytes; line += 64) {
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(tile) + prefetch_bytes +
                                                             static_cast<std::uintptr_t>(line)));
        }
        FP4LINEAR_UNROLL
        for (int part = 0; part < parts; ++part) {
            Float scale[step_groups];
            Simd::decode_scales(tile + step_code_bytes, plain_scales, part * Simd::lanes, scale);
            const std::uint8_t* codes = tile + part * Simd::lanes * 4;
            FP4LINEAR_UNROLL
            for (int first = 0; first < step_groups; first += side) {
                Float group[side][rows];
                FP4LINEAR_UNROLL
                for (int g = 0; g < side; ++g) {
                    FP4LINEAR_UNROLL
                    for (int r = 0; r < rows; ++r) group[g][r] = Simd::zero();
                }
                FP4LINEAR_UNROLL
                for (int half = 0; half < 2; ++half) {
                    typename Simd::Codes vectors[side];
                    FP4LINEAR_UNROLL
                    for (int g = 0; g < side; ++g) {
                        vectors[g] = Simd::load_codes(codes + 64 * (2 * (first + g) + half));
                    }
                    add_codes<Simd, rows, side>(vectors, x + group_k * first + 8 * half, group);
                }
                FP4LINEAR_UNROLL
                for (int g = 0; g < side; ++g) {
                    FP4LINEAR_UNROLL
                    for (int r = 0; r < rows; ++r)
                        sum[part][r] = Simd::fma(group[g][r], scale[first + g], sum[part][r]);
                }
            }
        }
        tile += step_bytes;
        x += rows * step_k;
    }
    FP4LINEAR_UNROLL
    for (int part = 0; part < parts; ++part) {
        FP4LINEAR_UNROLL
        for (int r = 0; r < rows; ++r) Simd::store(sums + r * tile_rows + part * Simd::lanes, sum[part][r]);
    }
}

template <class Simd, int most>
void gemv_fma_rows(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, int rows,
                   float* sums) {
    if (rows == most) {
        gemv_fma<Simd, most>(tile, steps, plain_scales, x, sums);
    } else if constexpr (most > 1) {
        gemv_fma_rows<Simd, most - 1>(tile, steps, plain_scales, x, rows, sums);
    }
}

}  // namespace
}  // namespace fp4linear::cpu
