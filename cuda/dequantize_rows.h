// Rows of a layer's weight in 16 bits, whatever form it is held in.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/device_weight.h"

namespace fp4linear::cuda {

// out [count, k], 16-byte aligned: e2m1 * e4m3 of rows [first, first + count), without scale2 and so exact. dtype:
// float16 or bfloat16. Asynchronous; throws on a CUDA error.
void dequantize_rows(const DeviceWeight& weight, std::int64_t first, std::int64_t count, DType dtype, void* out,
                     cudaStream_t stream);

}  // namespace fp4linear::cuda
