// Launch functions of gemm_fused: weights decoded in flight from the prepacked layout, no copy of the weight. Plain
// structs in, a CUDA error out; no allocation and no synchronisation.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fp4linear::cuda {

// y[m, n] = round(scale2[n] * sum_k x[m, k] * w[n, k] + bias[n]).
struct GemmArguments {
    std::int64_t n = 0;
    std::int64_t k = 0;  // a multiple of 64
    std::int64_t m = 0;
    DType dtype = DType::bfloat16;            // of x and y: float16 or bfloat16
    const void* x = nullptr;                  // [m, k], 16-byte aligned
    std::int64_t x_row_stride = 0;            // elements, a multiple of 8
    void* y = nullptr;                        // [m, n], C-contiguous, any alignment of its type
    const std::uint8_t* prepacked = nullptr;  // prepacked.h, 16-byte aligned, owned by the layer
    float scale2 = 1.0f;
    const float* scale2_rows = nullptr;  // [n], device; replaces scale2 where given
    float largest_scale2 = 1.0f;         // max |scale2| of all rows
    const float* bias = nullptr;         // [n], device, or null
    int sm_count = 0;
    int max_shared_memory = 232448;   // of a block, opt-in (cudaDevAttrMaxSharedMemoryPerBlockOptin)
    int kernel_arch = 90;             // the architecture that the loaded kernels were compiled for
    bool wgmma = true;                // gemm_wgmma_compiled
    bool programmatic_launch = true;  // SM90+: let this grid start while the previous one in the stream drains
    bool batch_invariant = false;     // the bits of a row of y do not depend on m
    void* workspace = nullptr;        // gemm_..._workspace() bytes, one a stream; arbitrary contents
    cudaStream_t stream = nullptr;
};

// Every M on SM80+ with mma.sync, up to 64 tokens on SM90 with wgmma. For tuning and tests: replaces the measured
// choice where token_tiles is not 0. The sets that exist are listed in the launch code.
struct GemmMmaTuning {
    int token_tiles = 0;   // of 8 tokens, in a block (streaming: all of M)
    int row_tiles = 0;     // streaming: row tiles that work together, 1 (mma.sync) or 4 (wgmma)
    int warps = 0;         // general: of a block
    int cluster = 0;       // streaming: blocks along K; 0: the general kernel
    int stages = 2;        // streaming: copies in flight in a warp
    int early_stages = 1;  // of them, requested before x
    int splits = 1;        // general: parts of K
};
bool gemm_mma_supports(const GemmArguments& arguments);
std::size_t gemm_mma_workspace(const GemmArguments& arguments);
// cudaErrorInvalidConfiguration without a tuning: few tokens, for whose x or sums the streaming kernels have no room,
// on a GPU where gemm_wgmma serves them.
cudaError_t gemm_mma(const GemmArguments& arguments, const GemmMmaTuning& tuning = {});

// gemm_wgmma.cu: SM90, through wgmma.

// For tuning and tests: replaces the measured choice where tokens is not 0. The sets that exist are listed in
// gemm_wgmma_choice.h; cudaErrorInvalidConfiguration for others.
struct GemmWgmmaTuning {
    int tokens = 0;        // of a tile: 16 to 256
    int groups = 2;        // warpgroups of a block, 64 rows each
    int stage_units = 2;   // K of a stage / 64
    int stages = 4;        // copies in flight
    int splits = 1;        // blocks that share a tile along K, a cluster; -1: two blocks that share x
    int blocks_an_sm = 0;  // persistent blocks; 0: a block for every tile
    int raster = 0;        // token tiles that are worked on together; 0: all
    int least_units = 4;   // K / 64 of a block's part of a tile that it shares, at least
    int sharing = 0;       // bit 0: one wave of whole tiles is shared too; bit 1: as many blocks for every shared tile;
                           // bit 2: helpers, least_units is what a part costs them
};

// Were the kernels that the current device loads compiled for sm_90a? wgmma is that target's alone: in a build for
// plain sm_90, or from PTX, they have no body.
cudaError_t gemm_wgmma_compiled(bool* compiled);
// K % 64 == 0, and the kernels are there.
bool gemm_wgmma_supports(const GemmArguments& arguments);
// The first gemm_wgmma_flag_bytes of the workspace must be zero before its first launch; every launch leaves them so.
inline constexpr std::size_t gemm_wgmma_flag_bytes = 16384;
std::size_t gemm_wgmma_workspace(const GemmArguments& arguments);
cudaError_t gemm_wgmma(const GemmArguments& arguments, const GemmWgmmaTuning& tuning = {});

// gemv_small.cu, SM80+: 8 tokens a block, for layers so small that a kernel is mostly latency. False: the layer is not.
bool gemm_small_supports(const GemmArguments& arguments);
cudaError_t gemm_small(const GemmArguments& arguments);

enum class GemmKernel : std::uint8_t { small, mma, wgmma };
GemmKernel choose_gemm(const GemmArguments& arguments);

}  // namespace fp4linear::cuda
