// Decode kernel with fp32 FMAs, for every set without bf16 dot products: 16 output rows, one a lane, times a few rows
// of x. The layout is the one of gemv_bf16.h; here each nibble of a lane is looked up as one fp32.
//
// Simd supplies: lanes, Float, Codes; zero, broadcast, fma, store; load_codes, weights<shift>(codes), the fp32 weights
// of nibble (codes >> shift); decode_scales(bytes, plain, first_row, scale[4]).
// A row's order of additions is the same for any number of rows: per group in order of k, then the groups in order.
#pragma once
#include "cpu/kernels.h"

namespace fp4linear::cpu {
namespace {

// Adds one code vector (8 k) of one group to the group's sums of all rows.
template <class Simd, int rows, int i = 0>
inline void add_codes(typename Simd::Codes codes, const float* x, typename Simd::Float* group) {
    if constexpr (i < 8) {
        // Even k are the nibbles of the low half of a lane, odd k those of the high half.
        const typename Simd::Float weights = Simd::template weights<4 * (i / 2) + 16 * (i % 2)>(codes);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) group[r] = Simd::fma(weights, Simd::broadcast(x + r * step_k + i), group[r]);
        add_codes<Simd, rows, i + 1>(codes, x, group);
    }
}

template <class Simd, int rows>
void gemv_fma(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x_staged, float* sums) {
    using Float = typename Simd::Float;
    constexpr int parts = tile_rows / Simd::lanes;
    constexpr std::int64_t prefetch_bytes = 8 * step_bytes;
    const auto* x = static_cast<const float*>(x_staged);
    Float sum[parts][rows];
    for (int part = 0; part < parts; ++part) {
        for (int r = 0; r < rows; ++r) sum[part][r] = Simd::zero();
    }
    for (std::int64_t s = 0; s < steps; ++s) {
        for (int line = 0; line < step_bytes; line += 64) {
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(tile) + prefetch_bytes +
                                                             static_cast<std::uintptr_t>(line)));
        }
#pragma GCC unroll 4
        for (int part = 0; part < parts; ++part) {
            Float scale[step_groups];
            Simd::decode_scales(tile + step_code_bytes, plain_scales, part * Simd::lanes, scale);
            const std::uint8_t* codes = tile + part * Simd::lanes * 4;
#pragma GCC unroll 4
            for (int g = 0; g < step_groups; ++g) {
                Float group[rows];
                for (int r = 0; r < rows; ++r) group[r] = Simd::zero();
                add_codes<Simd, rows>(Simd::load_codes(codes + 128 * g), x + group_k * g, group);
                add_codes<Simd, rows>(Simd::load_codes(codes + 128 * g + 64), x + group_k * g + 8, group);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) sum[part][r] = Simd::fma(group[r], scale[g], sum[part][r]);
            }
        }
        tile += step_bytes;
        x += rows * step_k;
    }
    for (int part = 0; part < parts; ++part) {
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
