// What the gemv_tensor_core kernels share: the end of a sum, and its repair.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/gemv_parameters.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device {

// Sums are kept * 2^sum_exponent until the epilogue.
template <class T>
constexpr int sum_exponent = 10;
template <>
constexpr int sum_exponent<Float16> = Float16::weight_exponent;

// 2^e, e in [-126, 127].
__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) <= 3.4028235e38f; }
__device__ __forceinline__ float scale2_of(const GemvParameters& p, std::int64_t row) {
    return p.scale2_rows != nullptr ? p.scale2_rows[row] : p.scale2;
}
__device__ __forceinline__ float bias_of(const GemvParameters& p, std::int64_t row) {
    return p.bias != nullptr ? p.bias[row] : 0.0f;
}

// The tokens of a tile that have outputs which are not finite, again in fp64, by the warp that has stored them: rare,
// and out of the way of the fast loop's registers. (Internal linkage: the compiler then fits its registers to the
// callers'.)
template <class T>
static __device__ __noinline__ void repair_tokens(const GemvParameters& p, std::int64_t tile, int first_token,
                                                  int last_token) {
    const int lane = threadIdx.x % 32;
    const std::int64_t first_row = tile * prepacked::unit_rows;
    for (int token = first_token; token < min(last_token, p.m); ++token) {
        std::uint16_t* const y = p.y + token * p.n + first_row;
        const bool stored = lane < prepacked::unit_rows && first_row + lane < p.n;
        if (__any_sync(0xFFFFFFFFu, stored && !is_finite(T::to_float(y[stored ? lane : 0]))))
            repair_tile<T>(p, tile, token, y, y + 8);
    }
}

// round(scale2 * sum + bias). In fp32 the factor 2^-sum_exponent joins scale2, which is exact unless scale2 is near the
// end of the range.
template <class T>
__device__ __forceinline__ std::uint16_t epilogue(float scale2, float bias, float sum) {
    if (fabsf(scale2) >= 0x1p-100f && fabsf(scale2) <= 0x1p100f)
        return T::from_float(
            fmaf(sum, scale2 * (sum_exponent<T> > 0 ? 1.0f / (1 << sum_exponent<T>) : 1 << -sum_exponent<T>), bias));
    constexpr double unit = sum_exponent<T> > 0 ? 1.0 / (1 << sum_exponent<T>) : 1 << -sum_exponent<T>;
    return T::from_double(static_cast<double>(sum) * unit * static_cast<double>(scale2) + static_cast<double>(bias));
}

}  // namespace fp4linear::cuda::device
