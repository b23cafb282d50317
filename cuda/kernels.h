// Launch functions of the CUDA kernels: plain structs in, a CUDA error out; no allocation and no synchronisation.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fp4linear::cuda {

// y[m, n] = round(scale2[n] * sum_k x[m, k] * w[n, k] + bias[n]).
struct GemvArguments {
    std::int64_t n = 0;
    std::int64_t k = 0;
    std::int64_t m = 0;
    DType dtype = DType::bfloat16;            // of x and y: float16 or bfloat16
    const void* x = nullptr;                  // rows contiguous along k
    std::int64_t x_row_stride = 0;            // elements
    void* y = nullptr;                        // [m, n], C-contiguous
    const std::uint8_t* prepacked = nullptr;  // gemv_tensor_core: prepacked.h, 16-byte aligned, owned by the layer
    const std::uint8_t* b = nullptr;          // gemv_scalar: canonical [n, k/2]
    const std::uint8_t* scales = nullptr;     // gemv_scalar: canonical [n, k/16]
    float scale2 = 1.0f;
    const float* scale2_rows = nullptr;  // [n], device; replaces scale2 where given
    const float* bias = nullptr;         // [n], device, or null
    int sm_count = 0;
    int max_shared_memory = 232448;   // of a block, opt-in (cudaDevAttrMaxSharedMemoryPerBlockOptin)
    int kernel_arch = 90;             // gemv_tensor_core_kernel_arch
    bool programmatic_launch = true;  // SM90+: let this grid start while the previous one in the stream drains
    void* workspace = nullptr;        // gemv_tensor_core_workspace() bytes, one a stream
    cudaStream_t stream = nullptr;
};

// For tuning and tests: replaces the measured choice where units is not 0. The sets that exist are listed in the launch
// code. chunk_units 0 means the kernel for small layers: groups is then its warps, stages its blocks an SM, the rest is
// ignored.
struct GemvTensorCoreTuning {
    int units = 0;          // K of a warp, in units of 64
    int chunk_units = 0;    // of one copy
    int blocks_per_sm = 0;  // that the registers leave room for
    int groups = 1;         // row tiles in flight in a block
    int stages = 2;         // copies in flight in a warp
    int early_stages = 1;   // of them, requested before x
    int cluster = 1;        // blocks that share a tile along K (SM90)
};

// Bytes of GemvArguments::workspace: 0 up to K = 8192 (4096 where a block has less than 120 KiB of shared memory).
std::size_t gemv_tensor_core_workspace(std::int64_t n, std::int64_t k, int max_shared_memory);

// The architecture that the loaded kernels were compiled for: 80 also where SM80 PTX runs on a newer GPU.
cudaError_t gemv_tensor_core_kernel_arch(int* arch);

inline constexpr std::int64_t gemv_tensor_core_max_m = 8;
bool gemv_tensor_core_supports(std::int64_t m, std::int64_t k, int block_size, int sm_version);
cudaError_t gemv_tensor_core(const GemvArguments& arguments, const GemvTensorCoreTuning& tuning = {});

// rows_per_block: 1, 2 or 4 forces the row tiling, 0 chooses it. Every choice gives the same bits.
inline constexpr std::int64_t gemv_scalar_max_m = 8;
bool gemv_scalar_supports(std::int64_t m, std::int64_t k, int block_size);
cudaError_t gemv_scalar(const GemvArguments& arguments, int rows_per_block = 0);

// Canonical to prepacked and back (bit for bit). All pointers are on the device; prepacked is 16-byte aligned.
cudaError_t prepack(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n, std::int64_t k,
                    std::uint8_t* prepacked, cudaStream_t stream);
cudaError_t unpack(const std::uint8_t* prepacked, std::int64_t n, std::int64_t k, std::uint8_t* b, std::uint8_t* scales,
                   cudaStream_t stream);

// Rows [row_begin, row_end) as e2m1 * e4m3 (scale2 left to the caller's alpha; exact in fp16 and bf16), row-major,
// [rows, k], 16-byte aligned.
cudaError_t dequantize_prepacked(const std::uint8_t* prepacked, std::int64_t k, std::int64_t row_begin,
                                 std::int64_t row_end, DType dtype, void* out, cudaStream_t stream);

}  // namespace fp4linear::cuda
