// NVFP4 to fp32, fp16 or bf16, [n, k] row-major. Bound by memory: half a byte read and 2 or 4 written per element.
//
// A block is 8 warps, one row of the weight each. A lane takes one run of codes of its row at a time, neighbouring
// lanes neighbouring runs, so that a warp reads and writes whole lines:
//   run_codes = 16: 8 bytes of codes and one scale; needs k % 16 = 0, whole 16-code blocks and aligned pointers
//   run_codes =  2: one byte and a scale for each of its codes; any even k, any block size, any alignment
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "cuda/backend.h"
#include "cuda/check.h"
#include "cuda/device/e2m1.cuh"
#include "cuda/device/e4m3.cuh"
#include "cuda/memory.h"

namespace fp4linear::cuda {

namespace {

constexpr int warp_size = 32;
constexpr int rows_per_block = 8;
constexpr int block_threads = warp_size * rows_per_block;
constexpr std::int64_t max_grid_x = 2147483647;  // CUDA programming guide, technical specifications
constexpr std::int64_t max_grid_y = 65535;
constexpr int wide_run = 16;
constexpr int narrow_run = 2;

template <class Out>
struct Pair {
    Out even_k;
    Out odd_k;
};

template <class Out>
__device__ __forceinline__ Out from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// e2m1 * e4m3 has six significant bits and lies in 2^-10 .. 2688, so the product of halves is exact.
template <class Out>
__device__ __forceinline__ Pair<Out> decode(std::uint32_t byte, __half2 scales, float scale2) {
    const float2 exact = __half22float2(__hmul2(half2_from_e2m1_byte(byte), scales));
    return {from_float<Out>(exact.x * scale2), from_float<Out>(exact.y * scale2)};
}

template <class Out, int run_codes>
__device__ __forceinline__ void decode_run(const DequantizeArguments& weight, std::int64_t row, std::int64_t run,
                                           float scale2, Out* out) {
    const std::int64_t k = run * run_codes;
    const std::int64_t blocks = (weight.k + weight.block_size - 1) / weight.block_size;
    const std::uint8_t* codes = weight.b + row * (weight.k / 2) + k / 2;
    const std::uint8_t* scales = weight.scales + row * blocks;
    Out* target = out + row * weight.k + k;
    if constexpr (run_codes == wide_run) {
        constexpr int pairs = wide_run / 2;
        const __half2 scale = __half2half2(half_from_e4m3(scales[k / weight.block_size]));
        const uint2 words = *reinterpret_cast<const uint2*>(codes);
        union {
            Pair<Out> pairs_of_run[pairs];
            uint4 vectors[sizeof(Out) * wide_run / sizeof(uint4)];
        } result;
#pragma unroll
        for (int i = 0; i < pairs; ++i) {
            const std::uint32_t word = i < pairs / 2 ? words.x : words.y;
            result.pairs_of_run[i] = decode<Out>((word >> (i % 4 * 8)) & 0xFFu, scale, scale2);
        }
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(result) / sizeof(uint4)); ++i)
            reinterpret_cast<uint4*>(target)[i] = result.vectors[i];
    } else {
        const __half2 both = __halves2half2(half_from_e4m3(scales[k / weight.block_size]),
                                            half_from_e4m3(scales[(k + 1) / weight.block_size]));
        const Pair<Out> result = decode<Out>(*codes, both, scale2);
        target[0] = result.even_k;
        target[1] = result.odd_k;
    }
}

template <class Out, int run_codes>
__global__ void __launch_bounds__(block_threads)
    dequantize_kernel(const __grid_constant__ DequantizeArguments weight, Out* __restrict__ out) {
    const std::int64_t runs = weight.k / run_codes;
    const std::int64_t row_step = static_cast<std::int64_t>(gridDim.x) * rows_per_block;
    const std::int64_t run_step = static_cast<std::int64_t>(gridDim.y) * warp_size;
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.x) * rows_per_block + threadIdx.y;
    const std::int64_t first_run = static_cast<std::int64_t>(blockIdx.y) * warp_size + threadIdx.x;
    for (std::int64_t row = first_row; row < weight.n; row += row_step) {
        const float scale2 = weight.scale2 == nullptr ? 1.0f : weight.scale2[weight.per_row ? row : 0];
        for (std::int64_t run = first_run; run < runs; run += run_step)
            decode_run<Out, run_codes>(weight, row, run, scale2, out);
    }
}

template <class Out, int run_codes>
void launch(const DequantizeArguments& weight, void* out, cudaStream_t stream) {
    const std::int64_t blocks_of_rows = (weight.n + rows_per_block - 1) / rows_per_block;
    const std::int64_t blocks_of_runs = (weight.k / run_codes + warp_size - 1) / warp_size;
    const dim3 grid(static_cast<unsigned>(std::min(blocks_of_rows, max_grid_x)),
                    static_cast<unsigned>(std::min(blocks_of_runs, max_grid_y)));
    dequantize_kernel<Out, run_codes>
        <<<grid, dim3(warp_size, rows_per_block), 0, stream>>>(weight, static_cast<Out*>(out));
    FP4LINEAR_CUDA_CHECK(cudaGetLastError());
}

bool is_aligned(const void* pointer, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

template <class Out>
void launch(const DequantizeArguments& weight, void* out, cudaStream_t stream) {
    const bool wide = weight.k % wide_run == 0 && weight.block_size % wide_run == 0 &&
                      is_aligned(weight.b, sizeof(uint2)) && is_aligned(out, sizeof(uint4));
    if (wide) {
        launch<Out, wide_run>(weight, out, stream);
    } else {
        launch<Out, narrow_run>(weight, out, stream);
    }
}

}  // namespace

void dequantize(const DequantizeArguments& weight, DType out_dtype, void* out, void* stream) {
    if (weight.n < 0 || weight.k < 0 || weight.k % 2 != 0 || weight.block_size < 1)
        throw std::invalid_argument("dequantize: n and k must be >= 0, k even and block_size >= 1");
    if (weight.n == 0 || weight.k == 0) return;
    const auto on = static_cast<cudaStream_t>(stream);
    switch (out_dtype) {
        case DType::float32: return launch<float>(weight, out, on);
        case DType::float16: return launch<__half>(weight, out, on);
        case DType::bfloat16: return launch<__nv_bfloat16>(weight, out, on);
    }
}

void dequantize_host(const DequantizeArguments& weight, DType out_dtype, void* out, int device) {
    if (weight.n == 0 || weight.k == 0) return;
    const DeviceGuard guard(device);
    const std::size_t n = static_cast<std::size_t>(weight.n);
    const std::size_t k = static_cast<std::size_t>(weight.k);
    const std::size_t block_size = static_cast<std::size_t>(weight.block_size);
    const DeviceBuffer b(n * (k / 2), weight.b);
    const DeviceBuffer scales(n * ((k + block_size - 1) / block_size), weight.scales);
    const DeviceBuffer scale2(weight.scale2 == nullptr ? 0 : (weight.per_row ? n : 1) * sizeof(float), weight.scale2);
    const DeviceBuffer result(n * k * size_of(out_dtype));

    DequantizeArguments on_device = weight;
    on_device.b = static_cast<const std::uint8_t*>(b.get());
    on_device.scales = static_cast<const std::uint8_t*>(scales.get());
    on_device.scale2 = static_cast<const float*>(scale2.get());
    dequantize(on_device, out_dtype, result.get(), nullptr);
    FP4LINEAR_CUDA_CHECK(cudaMemcpy(out, result.get(), n * k * size_of(out_dtype), cudaMemcpyDeviceToHost));
}

}  // namespace fp4linear::cuda
