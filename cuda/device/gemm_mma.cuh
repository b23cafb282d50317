// What the mma.sync kernels of gemm_fused share: scales as operands, and the end of a sum.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/repair.cuh"
#include "cuda/gemm.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device {

// A member of the kernels' __grid_constant__ parameters.
struct GemmOutput {
    RepairSource source;
    std::uint16_t* y;
    std::int64_t m;
    float smallest;  // sum to trust
};
inline GemmOutput gemm_output(const GemmArguments& a) {
    GemmOutput out{};
    out.source = {a.prepacked, static_cast<const std::uint16_t*>(a.x), a.x_row_stride, a.n, a.k, a.scale2_rows, a.bias,
                  a.scale2};
    out.y = static_cast<std::uint16_t*>(a.y);
    out.m = a.m;
    out.smallest = a.dtype == DType::float16 ? 0.0f : smallest_sum<BFloat16>(a.k, a.largest_scale2);
    return out;
}

#if __CUDA_ARCH__ >= 900
// A bulk copy of what is read once: the first that L2 gives up, so that x, sums and instructions stay.
__device__ __forceinline__ void bulk_copy_once(std::uint32_t destination, const void* source, std::uint32_t bytes,
                                               std::uint32_t barrier) {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
#endif

// Where part `i` begins when things are dealt out to parts of `each`, the first `extra` of which take one more.
__device__ __forceinline__ int part_begin(int i, int each, int extra) { return i * each + min(i, extra); }

__device__ __forceinline__ void add(float (&sums)[4], const float4& v) {
    sums[0] += v.x;
    sums[1] += v.y;
    sums[2] += v.z;
    sums[3] += v.w;
}

// The scales of rows g and g + 8 of a unit, from their 8 bytes: of row g for slices 0 and 1, for 2 and 3, then of g
// + 8.
template <class T>
__device__ __forceinline__ uint4 decode_scales(const uint2& bytes) {
    return make_uint4(T::scale_pair(bytes.x, 0), T::scale_pair(bytes.y, 0), T::scale_pair(bytes.x, 1),
                      T::scale_pair(bytes.y, 1));
}
// The A operand of a slice.
template <class T>
__device__ __forceinline__ void decode_slice(std::uint32_t word, const uint4& scales, int slice,
                                             std::uint32_t (&a)[4]) {
    T::decode(word, a);
    const std::uint32_t upper = slice < 2 ? scales.x : scales.y;
    const std::uint32_t lower = slice < 2 ? scales.z : scales.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = T::multiply(a[i], twice(i % 2 == 0 ? upper : lower, slice % 2 != 0));
}

template <class T>
constexpr float weight_factor = T::weight_exponent == -7 ? 0x1p7f : 0x1p14f;  // undoes weight_exponent

// Stores y of 16 rows x 8 tokens, which a warp holds as the mma gives them. A bit for each of a lane's two tokens that
// has an output to repair.
template <class T>
__device__ __forceinline__ unsigned store_fragment(const GemmOutput& p, const float (&sums)[4], std::int64_t tile,
                                                   std::int64_t token_tile, int lane) {
    unsigned repair = 0;
    const std::int64_t token = token_tile * 8 + lane % 4 * 2;
    const std::int64_t first_row = tile * prepacked::unit_rows + lane / 4;
    std::uint16_t* const y = p.y + token * p.source.n + first_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const std::int64_t row = first_row + 8 * h;
        if (row >= p.source.n) continue;
        const float scale2 = p.source.scale2_rows != nullptr ? p.source.scale2_rows[row] : p.source.scale2;
        const float bias = p.source.bias != nullptr ? p.source.bias[row] : 0.0f;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (token + j >= p.m) continue;
            const float sum = sums[2 * h + j];
            y[j * p.source.n + 8 * h] = T::from_float(fmaf(sum, scale2 * weight_factor<T>, bias));
            if (suspicious<T>(sum, p.smallest) || scale2_out_of_range(scale2)) repair |= 1u << j;
        }
    }
    return repair;
}

// After the stores of a whole warp, which owns these 16 rows x 8 tokens.
template <class T>
__device__ __forceinline__ void repair_fragment(const GemmOutput& p, unsigned repair, std::int64_t tile,
                                                std::int64_t token_tile) {
    if (!__any_sync(0xFFFFFFFFu, repair != 0)) return;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
        const unsigned lanes = __ballot_sync(0xFFFFFFFFu, (repair >> i % 2 & 1u) != 0);
        if ((lanes & 0x11111111u << i / 2) == 0) continue;
        std::uint16_t* const out = p.y + (token_tile * 8 + i) * p.source.n + tile * prepacked::unit_rows;
        repair_tile<T>(p.source, tile, token_tile * 8 + i, out, out + 8);
    }
}

}  // namespace fp4linear::cuda::device
