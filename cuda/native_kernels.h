// The kernels of native_nvfp4: NVFP4 x NVFP4 by CUTLASS's block-scaled collectives, one family of GPUs a file. No
// CUTLASS here: a build without it has no such file, and null for the family.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "dtype.h"

namespace fp4linear::cuda {

// y[m, n] = round(scale2[n] / g * sum over blocks of (xs * ws * sum of 16 products) + bias[n]). All on the device.
struct NativeArguments {
    std::int64_t m = 0, n = 0, k = 0;             // n and k are multiples of 32
    DType dtype = DType::bfloat16;                // of y: float16 or bfloat16
    const std::uint8_t* x_codes = nullptr;        // [m, k/2], the low nibble first; 16-byte aligned, as all below
    const std::uint8_t* x_scales = nullptr;       // of [m, k/16], in the 128x4 layout
    const std::uint8_t* weight_codes = nullptr;   // [n, k/2]
    const std::uint8_t* weight_scales = nullptr;  // of [n, k/16], in the 128x4 layout
    void* y = nullptr;                            // [m, n], C-contiguous
    float scale2 = 1.0f;
    const float* scale2_rows = nullptr;             // [n]; replaces scale2 where given
    float global_scale = 1.0f;                      // g
    const float* global_scale_on_device = nullptr;  // replaces global_scale where given
    const float* bias = nullptr;                    // [n], or null
    int device = 0;
    int sm_count = 0;
};

struct NativeTile {
    int m, n, k;    // of y, and of K in a stage
    int cluster_m;  // blocks that work on a tile together
};

// A family's functions.
struct NativeKernels {
    const char* name;
    NativeTile (*tile)(std::int64_t m);  // the one for m rows of x
    // Bytes of workspace: the arguments' sizes count, their pointers don't.
    std::size_t (*workspace)(const NativeArguments& arguments);
    // Why CUTLASS can't take these arguments (its can_implement()), or null. Needs no GPU.
    const char* (*cannot)(const NativeArguments& arguments);
    cudaError_t (*run)(const NativeArguments& arguments, void* workspace, cudaStream_t stream);
    // Does the current device load the kernels? A family's machine code runs on its members alone.
    bool (*loads)();
};

NativeKernels native_kernels_sm120();  // 12.0 and 12.1
NativeKernels native_kernels_sm100();  // 10.0 and 10.3

// Those for a compute capability (10 * major + minor), or null.
const NativeKernels* native_kernels(int sm);
// Why this build has none for it; "" where it has.
const char* why_no_native_kernels(int sm);

}  // namespace fp4linear::cuda
