// Outputs that the fast loops cannot sum in fp32, again in fp64: rare, and out of the way of their registers.
//
// Who calls what: the epilogue asks suspicious() for every sum and scale2_out_of_range() for every row, votes, and
// where a (row tile, token) has at least one such output, the warp that owns it calls repair_tile after (or instead of)
// its own store. All 16 outputs are then computed again, so that what is repaired depends on that tile and token alone.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device {

// A member of the kernel's __grid_constant__ parameters: repair_tile takes it by reference.
struct RepairSource {
    const std::uint8_t* weight;  // prepacked
    const std::uint16_t* x;
    std::int64_t x_row_stride;
    std::int64_t n;
    std::int64_t k;
    const float* scale2_rows;  // or null
    const float* bias;         // or null
    float scale2;
};

// The smallest |sum * 2^weight_exponent| to trust: below it the products that fp32 cannot hold (2^-150 at least, K of
// them) may show in y. 0 where scale2 is too small for that; fp16 sums lose nothing.
template <class T>
__host__ __device__ constexpr float smallest_sum(std::int64_t k, float largest_scale2) {
    return T::weight_exponent == -7 && largest_scale2 * static_cast<float>(k) > 16.0f
               ? static_cast<float>(k) * 0x1p-126f * 0x1p-7f
               : 0.0f;
}
// Infinite, NaN, or below smallest_sum(). fp16 x gives no infinite sum unless x has Inf or NaN, which a repair leaves
// alone.
template <class T>
__device__ __forceinline__ bool suspicious(float sum, float smallest) {
    return T::weight_exponent == -7 && (!(fabsf(sum) <= 3.4028235e38f) || fabsf(sum) < smallest);
}
// scale2 * 2^-weight_exponent would leave the range of fp32, or lose bits.
__device__ __forceinline__ bool scale2_out_of_range(float scale2) {
    const float magnitude = fabsf(scale2);
    return magnitude != 0.0f && !(magnitude >= 0x1p-100f && magnitude <= 0x1p100f);
}

// The 16 outputs of a row tile and a token in fp64, by a whole warp. They go to out[0..7] and out8[0..7] (shared or
// global), rows past n are left out. Nothing is written where x holds Inf or NaN, which propagate as the fast loop had
// them; an all-zero x (padding) does not touch the weight.
// (Internal linkage: the compiler then fits its registers to the callers'.)
template <class T>
static __device__ __noinline__ void repair_tile(const RepairSource& source, std::int64_t tile, std::int64_t token,
                                                std::uint16_t* out, std::uint16_t* out8) {
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const std::uint16_t* const x = source.x + token * source.x_row_stride;
    constexpr std::uint32_t infinity = T::weight_exponent == -7 ? 0x7F80u : 0x7C00u;
    std::uint32_t largest = 0;
    for (std::int64_t k = lane; k < source.k; k += 256) {  // k is a multiple of 32: the warp stays together
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (k + 32 * i < source.k) largest = max(largest, x[k + 32 * i] & 0x7FFFu);
        if (__any_sync(0xFFFFFFFFu, largest >= infinity)) break;
    }
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (largest >= infinity) return;
    double sums[2] = {0.0, 0.0};
    if (largest != 0) {
        const std::uint8_t* unit = source.weight + tile * prepacked::k_units(source.k) * prepacked::unit_bytes;
        for (std::int64_t k = 0; k < source.k; k += prepacked::unit_k, unit += prepacked::unit_bytes) {
#pragma unroll 1
            for (int s = 0; s < prepacked::unit_slices; ++s) {
                const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(unit + lane * 16 + s * 4);
                const std::uint8_t* const scales = unit + prepacked::unit_code_bytes + g * 8 + s * 2;
                const std::uint16_t* const slice = x + k + s * prepacked::slice_k + 2 * t;
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    const float scale = scale_magnitude(scales[pair & 1], 0) * 0x1p120f;
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const std::uint32_t code =
                            prepacked::code_from_word(word, 16 * half + prepacked::code_sign_bit(pair),
                                                      16 * half + prepacked::code_magnitude_shift(pair));
                        sums[pair & 1] += static_cast<double>(float_from_code(code) * scale) *
                                          static_cast<double>(T::to_float(slice[8 * (pair >> 1) + half]));
                    }
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        for (int offset = 1; offset < 4; offset *= 2) sums[h] += __shfl_xor_sync(0xFFFFFFFFu, sums[h], offset);
        const std::int64_t row = tile * prepacked::unit_rows + g + 8 * h;
        if (t == 0 && row < source.n) {
            const double scale2 = source.scale2_rows != nullptr ? source.scale2_rows[row] : source.scale2;
            const double bias = source.bias != nullptr ? source.bias[row] : 0.0f;
            (h == 0 ? out : out8)[g] = T::from_double(sums[h] * scale2 + bias);
        }
    }
}

}  // namespace fp4linear::cuda::device
