// Weights to the form of block-scaled tensor cores. Runs at construction: clarity before speed.
#include <stdexcept>

#include "cuda/check.h"
#include "cuda/device/grid_stride.cuh"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/native_weight.h"
#include "cuda/prepacked.h"
#include "cuda/weight.h"
#include "formats/native_weight.h"
#include "formats/swizzle.h"

namespace fp4linear::cuda {
namespace {

using namespace device::grid_stride;

struct CanonicalScales {
    const std::uint8_t* scales;
    std::int64_t blocks;
    __device__ std::uint8_t operator()(std::int64_t row, std::int64_t block) const {
        return scales[row * blocks + block];
    }
};

struct PrepackedScales {
    const std::uint8_t* weight;
    std::int64_t k;
    __device__ std::uint8_t operator()(std::int64_t row, std::int64_t block) const {
        return weight[prepacked::scale_position(row, block, k)];
    }
};

// A thread writes the 4 bytes of one row of an atom, padding too.
template <class Scales>
__global__ void __launch_bounds__(threads)
    swizzle_kernel(Scales scales, std::int64_t n, std::int64_t blocks, std::uint8_t* swizzled) {
    const std::int64_t groups = swizzle::padded_blocks(blocks) / swizzle::atom_blocks;
    const std::int64_t count = swizzle::padded_rows(n) * groups;
    for (std::int64_t i = first_item(); i < count; i += item_step()) {
        const std::int64_t row = i / groups;
        const std::int64_t first = i % groups * swizzle::atom_blocks;
        std::uint32_t word = 0;
        for (int j = 0; j < swizzle::atom_blocks; ++j)
            if (row < n && first + j < blocks)
                word |= static_cast<std::uint32_t>(native_weight::scale(scales(row, first + j))) << 8 * j;
        *reinterpret_cast<std::uint32_t*>(swizzled + swizzle::offset(row, first, blocks)) = word;
    }
}

__global__ void __launch_bounds__(threads) codes_kernel(const std::uint8_t* b, CanonicalScales scales, std::int64_t n,
                                                        std::int64_t row_bytes, std::uint8_t* codes) {
    for (std::int64_t i = first_item(); i < n * row_bytes; i += item_step())
        codes[i] = native_weight::codes(b[i], scales(i / row_bytes, i % row_bytes * 2 / native_weight::block_size));
}

template <class Scales>
cudaError_t launch_swizzle(Scales scales, std::int64_t n, std::int64_t blocks, std::uint8_t* swizzled,
                           cudaStream_t stream) {
    const std::int64_t words = swizzle::size(n, blocks) / swizzle::atom_blocks;
    swizzle_kernel<<<blocks_for(words), threads, 0, stream>>>(scales, n, blocks, swizzled);
    return cudaGetLastError();
}

}  // namespace

cudaError_t native_weight_from_canonical(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n,
                                         std::int64_t k, std::uint8_t* codes, std::uint8_t* swizzled,
                                         cudaStream_t stream) {
    const CanonicalScales from{scales, native_weight::row_blocks(k)};
    if (codes != nullptr) {
        codes_kernel<<<blocks_for(n * (k / 2)), threads, 0, stream>>>(b, from, n, k / 2, codes);
        if (const cudaError_t e = cudaGetLastError()) return e;
    }
    return swizzled == nullptr ? cudaSuccess : launch_swizzle(from, n, from.blocks, swizzled, stream);
}

cudaError_t native_scales_from_prepacked(const std::uint8_t* weight, std::int64_t n, std::int64_t k,
                                         std::uint8_t* swizzled, cudaStream_t stream) {
    return launch_swizzle(PrepackedScales{weight, k}, n, k / native_weight::block_size, swizzled, stream);
}

void native_weight_host(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n, std::int64_t k,
                        bool by_prepacked, std::uint8_t* codes, std::uint8_t* swizzled, int device) {
    if (by_prepacked && !prepacked::supports(k, native_weight::block_size))
        throw std::invalid_argument("native_weight: K of a prepacked weight must be a multiple of 64");
    const DeviceGuard guard(device);
    const auto bytes = [](const DeviceBuffer& buffer) { return static_cast<std::uint8_t*>(buffer.get()); };
    const auto code_bytes = static_cast<std::size_t>(n * (k / 2));
    const auto scale_bytes = static_cast<std::size_t>(n * native_weight::row_blocks(k));
    const auto swizzled_bytes = static_cast<std::size_t>(swizzle::size(n, native_weight::row_blocks(k)));
    const DeviceBuffer canonical_b(code_bytes, b), canonical_scales(scale_bytes, scales);
    const DeviceBuffer made_codes(code_bytes), made_scales(swizzled_bytes);
    // What is not written shows.
    FP4LINEAR_CUDA_CHECK(cudaMemset(made_codes.get(), 0xA5, code_bytes));
    FP4LINEAR_CUDA_CHECK(cudaMemset(made_scales.get(), 0xA5, swizzled_bytes));
    FP4LINEAR_CUDA_CHECK(native_weight_from_canonical(bytes(canonical_b), bytes(canonical_scales), n, k,
                                                      bytes(made_codes), by_prepacked ? nullptr : bytes(made_scales),
                                                      nullptr));
    const DeviceBuffer weight(by_prepacked ? prepacked::size(n, k) : 0);
    if (by_prepacked) {
        FP4LINEAR_CUDA_CHECK(prepack(bytes(canonical_b), bytes(canonical_scales), n, k, bytes(weight), nullptr));
        FP4LINEAR_CUDA_CHECK(native_scales_from_prepacked(bytes(weight), n, k, bytes(made_scales), nullptr));
    }
    copy(codes, made_codes.get(), code_bytes);
    copy(swizzled, made_scales.get(), swizzled_bytes);
}

}  // namespace fp4linear::cuda
