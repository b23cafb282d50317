// native_emulated on the device: x quantised to NVFP4 and multiplied as cpu::run_native_emulated() does, the same bits.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device_weight.h"
#include "cuda/quantize_activations.h"
#include "problem.h"

namespace fp4linear::cuda {

// y[m, first_column .. + n] of rows of the weight in canonical form; all pointers on the device.
struct EmulatedArguments {
    std::int64_t m = 0, n = 0, k = 0;        // n: rows of the weight that are here; k is even
    DType dtype = DType::bfloat16;           // of y: float16 or bfloat16
    const std::uint8_t* x_codes = nullptr;   // [m, k/2]
    const std::uint8_t* x_scales = nullptr;  // [m, ceil(k/16)]
    const std::uint8_t* b = nullptr;         // [n, k/2]
    const std::uint8_t* scales = nullptr;    // [n, ceil(k/16)]
    float scale2 = 1.0f;
    const float* scale2_rows = nullptr;  // [n]; replaces scale2 where given
    const float* bias = nullptr;         // [n], or null
    GlobalScale global_scale;            // of x
    void* y = nullptr;                   // of column 0 of these n
    std::int64_t y_row_stride = 0;       // elements
};
cudaError_t multiply_emulated(const EmulatedArguments& arguments, cudaStream_t stream);

// The path. input_global_scale: 0 takes the dynamic one. May be captured.
void native_emulated(const DeviceWeight& weight, const Problem& problem, float input_global_scale, cudaStream_t stream);

}  // namespace fp4linear::cuda
