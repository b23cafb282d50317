// The path native_nvfp4: x quantised to NVFP4, and block-scaled tensor cores.
#pragma once
#include <cuda_runtime_api.h>

#include "cuda/device_weight.h"
#include "problem.h"

namespace fp4linear::cuda {

// The weight was made for it (native_codes(), swizzled_scales()). input_global_scale: 0 takes that of this call's x.
// Throws on a CUDA error, and std::invalid_argument for what CUTLASS refuses.
void native_nvfp4(const DeviceWeight& weight, const Problem& problem, float input_global_scale, cudaStream_t stream);

}  // namespace fp4linear::cuda
