// Canonical NVFP4 weights to the prepacked layout and back, bit for bit, and dequantisation from the prepacked layout.
// The first two run at construction and on request, so clarity before speed; consecutive threads still touch
// neighbouring bytes. The last is the first half of dequant_cublas, bound by memory: 0.56 bytes in and 2 out a weight.
#include <cuda_runtime.h>

#include "cuda/device/fp4.cuh"
#include "cuda/device/grid_stride.cuh"
#include "cuda/kernels.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace prepacked;

using namespace device::grid_stride;

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

// Lane t of a group of 4 holds words 4 * t' + t of a row's 16-byte pieces t'; afterwards it holds piece t whole.
__device__ __forceinline__ uint4 transpose_quad(std::uint32_t (&w)[4], int t) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & bit) != 0) continue;
            const bool upper = (t & bit) != 0;
            const std::uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? w[i] : w[i | bit], bit);
            (upper ? w[i] : w[i | bit]) = received;
        }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// A warp takes a unit: 16 bytes of codes and the 8 scales of its two rows a lane; whole 32-byte sectors out.
template <class T>
__global__ void __launch_bounds__(threads)
    dequantize_kernel(const std::uint8_t* __restrict__ weight, std::int64_t k, std::int64_t row_begin,
                      std::int64_t row_end, std::uint16_t* __restrict__ out) {
#if __CUDA_ARCH__ >= 800
    constexpr int warps = threads / 32;
    // 2^-exponent of what the decoded weight has been multiplied by, twice in a word: exact, w is in the normal range.
    constexpr std::uint32_t restore =
        T::weight_exponent == -7 ? 0x43004300u /* bf16 2^7 */ : 0x74007400u /* fp16 2^14 */;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const std::int64_t units = k_units(k);
    const std::int64_t first_tile = row_begin / unit_rows;
    const std::int64_t count = ((row_end + unit_rows - 1) / unit_rows - first_tile) * units;
    for (std::int64_t i = blockIdx.x * std::int64_t{warps} + threadIdx.x / 32; i < count;
         i += gridDim.x * std::int64_t{warps}) {
        const std::int64_t tile = first_tile + i / units;
        const std::uint8_t* unit = weight + (tile * units + i % units) * unit_bytes;
        const uint4 codes = __ldcs(reinterpret_cast<const uint4*>(unit) + lane);
        const uint2 bytes = __ldcs(reinterpret_cast<const uint2*>(unit + unit_code_bytes) + g);
        const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
        std::uint32_t pieces[2][2][4];  // [row g or g + 8][K 0-31 or 32-63][8 K each]
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const std::uint32_t pair01 = T::scale_pair(bytes.x, h);
            const std::uint32_t pair23 = T::scale_pair(bytes.y, h);
            const std::uint32_t scales[4] = {device::twice(pair01, false), device::twice(pair01, true),
                                             device::twice(pair23, false), device::twice(pair23, true)};
#pragma unroll
            for (int s = 0; s < 4; ++s) {
                std::uint32_t a[4];
                T::decode(words[s], a);
                pieces[h][s / 2][s % 2 * 2] = T::multiply(T::multiply(a[h], scales[s]), restore);
                pieces[h][s / 2][s % 2 * 2 + 1] = T::multiply(T::multiply(a[h + 2], scales[s]), restore);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const std::int64_t row = tile * unit_rows + g + 8 * h;
            const bool wanted = row >= row_begin && row < row_end;
            auto* target = reinterpret_cast<uint4*>(out + (row - row_begin) * k + i % units * unit_k);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint4 piece = transpose_quad(pieces[h][half], t);
                if (wanted) target[half * 4 + t] = piece;
            }
        }
    }
#endif
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
    if (row_end <= row_begin) return cudaSuccess;
    if (reinterpret_cast<std::uintptr_t>(out) % sizeof(uint4) != 0) return cudaErrorMisalignedAddress;
    auto* const kernel =
        dtype == DType::float16 ? dequantize_kernel<device::Float16> : dequantize_kernel<device::BFloat16>;
    const std::int64_t units = (row_tiles(row_end) - row_begin / unit_rows) * k_units(k);
    kernel<<<blocks_for(units * 32), threads, 0, stream>>>(weight, k, row_begin, row_end,
                                                           static_cast<std::uint16_t*>(out));
    return cudaGetLastError();
}

}  // namespace fp4linear::cuda
