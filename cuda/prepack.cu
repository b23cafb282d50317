// Canonical NVFP4 weights to the prepacked layout and back, bit for bit, and dequantisation from the prepacked layout.
// Run at construction and on request, so clarity before speed; consecutive threads still touch neighbouring bytes.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device/fp4.cuh"
#include "cuda/kernels.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace prepacked;

constexpr int threads = 256;
constexpr std::int64_t max_blocks = 1 << 16;  // grid-stride loops take the rest

unsigned blocks_for(std::int64_t items) {
    return static_cast<unsigned>(std::min(max_blocks, (items + threads - 1) / threads));
}
__device__ std::int64_t first_item() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ std::int64_t item_step() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

// A thread writes one code word, or four scale bytes.
__global__ void __launch_bounds__(threads) prepack_kernel(const std::uint8_t* b, const std::uint8_t* scales,
                                                          std::int64_t n, std::int64_t k, std::uint32_t* out) {
    constexpr int words = unit_bytes / 4;
    const std::int64_t units = k_units(k);
    const std::int64_t blocks = k / slice_k;
    const std::int64_t count = row_tiles(n) * units * words;
    for (std::int64_t i = first_item(); i < count; i += item_step()) {
        const std::int64_t unit = i / words;
        const int w = static_cast<int>(i % words);
        const std::int64_t first_row = unit / units * unit_rows;
        const std::int64_t first_k = unit % units * unit_k;
        std::uint32_t word = 0;
        if (w < unit_code_bytes / 4) {
            for (int pair = 0; pair < 4; ++pair) {
                const ElementOfUnit e = element_of_code(w / 4, w % 4, pair, 0);
                const std::int64_t row = first_row + e.row;
                if (row >= n) continue;
                const std::int64_t column = first_k + e.k;
                const std::uint32_t flip = scales[row * blocks + column / slice_k] >> 7 << 3;
                const std::uint32_t byte = b[row * (k / 2) + column / 2];
                for (int half = 0; half < 2; ++half)
                    word |= word_from_code(((byte >> 4 * half) & 0xFu) ^ flip, 16 * half + code_sign_bit(pair),
                                           16 * half + code_magnitude_shift(pair));
            }
        } else {
            for (int j = 0; j < 4; ++j) {
                const ElementOfUnit e = element_of_scale((w - unit_code_bytes / 4) * 4 + j);
                const std::int64_t row = first_row + e.row;
                if (row < n)
                    word |= static_cast<std::uint32_t>(scales[row * blocks + (first_k + e.k) / slice_k]) << 8 * j;
            }
        }
        out[i] = word;
    }
}

__device__ std::uint32_t code_at(const std::uint8_t* weight, std::int64_t row, std::int64_t column, std::int64_t k) {
    const CodePosition position = code_position(row, column, k);
    return code_from_word(*reinterpret_cast<const std::uint32_t*>(weight + position.word), position.sign_bit,
                          position.magnitude_shift);
}

// A thread writes the 8 bytes and the scale of one block.
__global__ void __launch_bounds__(threads)
    unpack_kernel(const std::uint8_t* weight, std::int64_t n, std::int64_t k, std::uint8_t* b, std::uint8_t* scales) {
    const std::int64_t blocks = k / slice_k;
    for (std::int64_t i = first_item(); i < n * blocks; i += item_step()) {
        const std::int64_t row = i / blocks;
        const std::int64_t block = i % blocks;
        const std::uint8_t scale = weight[scale_position(row, block, k)];
        const std::uint32_t flip = scale >> 7 << 3;
        for (int j = 0; j < slice_k / 2; ++j) {
            const std::uint32_t low = code_at(weight, row, block * slice_k + 2 * j, k) ^ flip;
            const std::uint32_t high = code_at(weight, row, block * slice_k + 2 * j + 1, k) ^ flip;
            b[i * (slice_k / 2) + j] = static_cast<std::uint8_t>(low | high << 4);
        }
        scales[i] = scale;
    }
}

template <class Out>
__device__ void store(Out* out, float v);
template <>
__device__ void store(float* out, float v) {
    *out = v;
}
template <>
__device__ void store(__half* out, float v) {
    *out = __float2half_rn(v);
}
template <>
__device__ void store(__nv_bfloat16* out, float v) {
    *out = __float2bfloat16_rn(v);
}

// A thread writes one block of 16.
template <class Out>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(const std::uint8_t* weight, std::int64_t k, std::int64_t row_begin, std::int64_t rows, Out* out) {
    const std::int64_t blocks = k / slice_k;
    for (std::int64_t i = first_item(); i < rows * blocks; i += item_step()) {
        const std::int64_t row = row_begin + i / blocks;
        const std::int64_t block = i % blocks;
        const std::uint8_t byte = weight[scale_position(row, block, k)];
        // The sign of the scale is in the codes; a NaN byte is NaN whatever the code.
        const float scale =
            (byte & 0x7F) == 0x7F ? __int_as_float(0x7FC00000) : device::scale_magnitude(byte, 0) * 0x1p120f;
        for (int j = 0; j < slice_k; ++j)
            store(out + i * slice_k + j, device::float_from_code(code_at(weight, row, block * slice_k + j, k)) * scale);
    }
}

}  // namespace

cudaError_t prepack(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n, std::int64_t k,
                    std::uint8_t* weight, cudaStream_t stream) {
    if (n == 0) return cudaSuccess;
    prepack_kernel<<<blocks_for(row_tiles(n) * k_units(k) * (unit_bytes / 4)), threads, 0, stream>>>(
        b, scales, n, k, reinterpret_cast<std::uint32_t*>(weight));
    return cudaGetLastError();
}

cudaError_t unpack(const std::uint8_t* weight, std::int64_t n, std::int64_t k, std::uint8_t* b, std::uint8_t* scales,
                   cudaStream_t stream) {
    if (n == 0) return cudaSuccess;
    unpack_kernel<<<blocks_for(n * (k / slice_k)), threads, 0, stream>>>(weight, n, k, b, scales);
    return cudaGetLastError();
}

cudaError_t dequantize_prepacked(const std::uint8_t* weight, std::int64_t k, std::int64_t row_begin,
                                 std::int64_t row_end, DType dtype, void* out, cudaStream_t stream) {
    const std::int64_t rows = row_end - row_begin;
    if (rows <= 0) return cudaSuccess;
    const unsigned blocks = blocks_for(rows * (k / slice_k));
    switch (dtype) {
        case DType::float16:
            dequantize_kernel<<<blocks, threads, 0, stream>>>(weight, k, row_begin, rows, static_cast<__half*>(out));
            break;
        case DType::bfloat16:
            dequantize_kernel<<<blocks, threads, 0, stream>>>(weight, k, row_begin, rows,
                                                              static_cast<__nv_bfloat16*>(out));
            break;
        case DType::float32:
            dequantize_kernel<<<blocks, threads, 0, stream>>>(weight, k, row_begin, rows, static_cast<float*>(out));
            break;
    }
    return cudaGetLastError();
}

}  // namespace fp4linear::cuda
