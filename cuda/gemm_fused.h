// The choice between the kernels of gemm_fused.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/device_weight.h"
#include "problem.h"

namespace fp4linear::cuda {

// The weight is prepacked. Any m >= 1. batch_invariant: the bits of a row of y depend on that row of x alone.
void gemm_fused(const DeviceWeight& weight, const Problem& problem, bool batch_invariant, cudaStream_t stream);

// gemv_tensor_core of 2 to 8 rows where K is so deep that the streaming kernel of gemm_fused, which holds x in shared
// memory, is ahead. False: nothing was done, the call is not such a one.
bool gemv_deep(const DeviceWeight& weight, const Problem& problem, cudaStream_t stream);

}  // namespace fp4linear::cuda
