// The path dequant_cublas: the weight in chunks to 16 bits, cuBLAS for the product.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/device_weight.h"
#include "problem.h"

namespace fp4linear::cuda {

// Any even K, any block size, any N and M; x_row_stride >= K. Throws on a CUDA or cuBLAS error.
void dequant_cublas(const DeviceWeight& weight, const Problem& problem, cudaStream_t stream);

}  // namespace fp4linear::cuda
