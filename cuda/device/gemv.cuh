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

// One output's sum in fp64 by a whole warp. False where x is not finite.
template <class T>
static __device__ bool exact_sum(const GemvParameters& p, std::int64_t row, int token, double& sum) {
    const int lane = threadIdx.x % 32;
    const std::uint16_t* x = p.x + token * p.x_row_stride;
    bool finite = true;
    sum = 0.0;
    for (std::int64_t k = lane; k < p.k; k += 32) {
        const prepacked::CodePosition position = prepacked::code_position(row, k, p.k);
        const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(p.weight + position.word);
        const std::uint32_t code = prepacked::code_from_word(word, position.sign_bit, position.magnitude_shift);
        const std::uint8_t scale = p.weight[prepacked::scale_position(row, k / prepacked::slice_k, p.k)];
        const float value = T::to_float(x[k]);
        finite = finite && is_finite(value);
        sum += static_cast<double>(float_from_code(code) * (scale_magnitude(scale, 0) * 0x1p120f)) *
               static_cast<double>(value);
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    return __all_sync(0xFFFFFFFFu, finite);
}

// Outputs of a tile that are not finite, again in fp64, by the warp that has stored them: rare, and out of the way of
// the fast loop's registers. (Internal linkage: the compiler then fits its registers to the callers'.)
template <class T>
static __device__ __noinline__ void repair_tile(const GemvParameters& p, std::int64_t tile, int first_token,
                                                int last_token) {
    const int lane = threadIdx.x % 32;
    for (int token = first_token; token < min(last_token, p.m); ++token)
        for (int r = 0; r < prepacked::unit_rows; ++r) {
            const std::int64_t row = tile * prepacked::unit_rows + r;
            if (row >= p.n || is_finite(T::to_float(p.y[token * p.n + row]))) continue;
            double sum;
            if (!exact_sum<T>(p, row, token, sum))
                break;  // the whole token: Inf and NaN propagate as the fast loop had them
            if (lane == 0)
                p.y[token * p.n + row] =
                    T::from_double(sum * static_cast<double>(scale2_of(p, row)) + static_cast<double>(bias_of(p, row)));
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
