// Kernels whose threads walk items in steps of the grid, for what runs once a layer.
#pragma once
#include <algorithm>
#include <cstdint>

namespace fp4linear::cuda::device::grid_stride {

constexpr int threads = 256;
constexpr std::int64_t max_blocks = 1 << 16;  // grid-stride loops take the rest

inline unsigned blocks_for(std::int64_t items) {
    return static_cast<unsigned>(std::min(max_blocks, (items + threads - 1) / threads));
}
__device__ inline std::int64_t first_item() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline std::int64_t item_step() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

}  // namespace fp4linear::cuda::device::grid_stride
