// gemv_scalar: a few rows of x against a canonical NVFP4 weight, on any GPU.
//
// A warp owns one output column, 8 warps a block. In an iteration each lane takes 32 K elements: 16 weight bytes, two
// scale bytes, 32 activations of each of `Rows` rows that share the decode. A row's sums have the same order whatever
// Rows is, so every tiling gives the same bits. Sums are kept * 2^10, and leave to fp64 when they leave the
// fp32 range, for the reasons in gemv_tensor_core.cu.
#include <cuda_runtime.h>

#include "cuda/device/e2m1.cuh"
#include "cuda/device/e4m3.cuh"
#include "cuda/device/fp4.cuh"
#include "cuda/kernels.h"

namespace fp4linear::cuda {
namespace {

using namespace device;

constexpr int warps = 8;        // a block, one output column each
constexpr int lane_k = 32;      // K elements of a lane in an iteration
constexpr int block_size = 16;  // of the format

struct Parameters {
    const std::uint8_t* b;
    const std::uint8_t* scales;
    const std::uint16_t* x;
    std::uint16_t* y;
    const float* scale2_rows;
    const float* bias;
    float scale2;
    std::int64_t x_row_stride;
    std::int64_t n;
    std::int64_t k;
    int m;
};

// A raw E4M3 byte * 2^10.
__device__ __forceinline__ float scaled_e4m3(std::uint32_t byte) {
    return __half2float(half_from_e4m3(static_cast<std::uint8_t>(byte))) * 1024.0f;
}

// 8 codes in memory order: v[i] is the code at bits 4i.
__device__ __forceinline__ void decode_word(std::uint32_t word, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // codes i and i + 4 share a register
        const float2 values = __half22float2(half2_from_e2m1(word >> (4 * i)));
        v[i] = values.x;
        v[i + 4] = values.y;
    }
}

// Unaligned arrays are read element by element.
template <bool Aligned>
__device__ __forceinline__ uint4 load_16_bytes(const void* p) {
    if constexpr (Aligned) {
        return *reinterpret_cast<const uint4*>(p);
    } else {
        const auto* bytes = static_cast<const std::uint8_t*>(p);
        std::uint32_t words[4] = {};
#pragma unroll
        for (int i = 0; i < 16; ++i) words[i / 4] |= static_cast<std::uint32_t>(bytes[i]) << (8 * (i % 4));
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// The sum of a column in fp64, by a warp, for one that left the fp32 range; `fast` where x or a scale is not finite.
template <class T>
__device__ __noinline__ double exact_sum(const Parameters& p, std::int64_t column, int row, double fast) {
    const int lane = threadIdx.x % 32;
    const std::uint16_t* x = p.x + row * p.x_row_stride;
    const std::uint8_t* b = p.b + column * (p.k / 2);
    const std::uint8_t* scales = p.scales + column * (p.k / block_size);
    for (std::int64_t k = lane; k < p.k; k += 32)
        if (__any_sync(0xFFFFFFFFu,
                       !(fabsf(T::to_float(x[k])) <= 3.4028235e38f) || (scales[k / block_size] & 0x7F) == 0x7F))
            return fast;
    double sum = 0.0;
    for (std::int64_t k = lane; k < p.k; k += 32)
        sum += static_cast<double>(float_from_code(b[k / 2] >> (k % 2 * 4)) * scaled_e4m3(scales[k / block_size])) *
               static_cast<double>(T::to_float(x[k]));
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
    return sum;
}

template <class T, int Rows, bool Aligned>
__global__ void __launch_bounds__(warps * 32) scalar_kernel(const __grid_constant__ Parameters p) {
    const int lane = threadIdx.x % 32;
    const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
    if (column >= p.n) return;
    const int first_row = static_cast<int>(blockIdx.y) * Rows;
    const std::uint8_t* b = p.b + column * (p.k / 2);
    const std::uint8_t* scales = p.scales + column * (p.k / block_size);

    float acc[Rows] = {};
    for (std::int64_t k = lane * lane_k; k < p.k; k += 32 * lane_k) {
        const uint4 packed = load_16_bytes<Aligned>(b + k / 2);
        const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
        const float block_scales[2] = {scaled_e4m3(scales[k / block_size]), scaled_e4m3(scales[k / block_size + 1])};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float block_sums[Rows] = {};
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                float weights[8];
                decode_word(words[2 * half + w], weights);
#pragma unroll
                for (int r = 0; r < Rows; ++r) {
                    const int row = first_row + r;
                    if (row >= p.m) continue;
                    const uint4 v = load_16_bytes<Aligned>(p.x + row * p.x_row_stride + k + half * block_size + w * 8);
                    const std::uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        block_sums[r] =
                            fmaf(weights[i], T::to_float(static_cast<std::uint16_t>(pairs[i / 2] >> (16 * (i % 2)))),
                                 block_sums[r]);
                }
            }
#pragma unroll
            for (int r = 0; r < Rows; ++r) acc[r] = fmaf(block_sums[r], block_scales[half], acc[r]);
        }
    }

#pragma unroll
    for (int r = 0; r < Rows; ++r) {
        const int row = first_row + r;
        if (row >= p.m) break;
        float sum = acc[r];
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        double value = static_cast<double>(sum);
        if (!(fabsf(sum) <= 3.4028235e38f)) value = exact_sum<T>(p, column, row, value);
        if (lane == 0) {
            const float scale2 = p.scale2_rows != nullptr ? p.scale2_rows[column] : p.scale2;
            const float bias = p.bias != nullptr ? p.bias[column] : 0.0f;
            p.y[row * p.n + column] =
                T::from_double(value * 0x1p-10 * static_cast<double>(scale2) + static_cast<double>(bias));
        }
    }
}

template <class T, int Rows>
cudaError_t launch(const Parameters& p, cudaStream_t stream) {
    const bool aligned = reinterpret_cast<std::uintptr_t>(p.b) % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(p.x) % 16 == 0 && (p.m == 1 || p.x_row_stride % 8 == 0);
    const dim3 grid(static_cast<unsigned>((p.n + warps - 1) / warps), static_cast<unsigned>((p.m + Rows - 1) / Rows));
    if (aligned)
        scalar_kernel<T, Rows, true><<<grid, warps * 32, 0, stream>>>(p);
    else
        scalar_kernel<T, Rows, false><<<grid, warps * 32, 0, stream>>>(p);
    return cudaGetLastError();
}

template <class T>
cudaError_t launch_rows(const Parameters& p, int rows, cudaStream_t stream) {
    switch (rows) {
        case 1: return launch<T, 1>(p, stream);
        case 2: return launch<T, 2>(p, stream);
        case 4: return launch<T, 4>(p, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

bool gemv_scalar_supports(std::int64_t m, std::int64_t k, int block) {
    return m >= 1 && m <= gemv_scalar_max_m && block == block_size && k % lane_k == 0;
}

cudaError_t gemv_scalar(const GemvArguments& a, int rows_per_block) {
    Parameters p{a.b,
                 a.scales,
                 static_cast<const std::uint16_t*>(a.x),
                 static_cast<std::uint16_t*>(a.y),
                 a.scale2_rows,
                 a.bias,
                 a.scale2,
                 a.x_row_stride,
                 a.n,
                 a.k,
                 static_cast<int>(a.m)};
    // ONNX Runtime's rule for MatMulBlockQuantizedFp4Weight: share decodes once the columns alone fill the GPU.
    const std::int64_t column_blocks = (a.n + warps - 1) / warps;
    int rows = a.m <= 1 || column_blocks < a.sm_count ? 1 : a.m >= 4 ? 4 : 2;
    if (rows_per_block != 0) rows = rows_per_block;
    return a.dtype == DType::float16 ? launch_rows<Float16>(p, rows, a.stream)
                                     : launch_rows<BFloat16>(p, rows, a.stream);
}

}  // namespace fp4linear::cuda
