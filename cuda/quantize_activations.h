// Activations to NVFP4 on the device: the bits of formats/activation.h, as the CPU's quantize_activations() gives them.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "formats/swizzle.h"
#include "problem.h"

namespace fp4linear::cuda {

// The global scale of x (reciprocal convention: it multiplies x): known to the host, or in device memory.
struct GlobalScale {
    float value = 1.0f;             // finite and > 0
    const float* device = nullptr;  // replaces value where given
};

// What dynamic_global_scale() works in; it writes all of it.
struct DynamicScale {
    std::uint32_t amax;      // bits of the greatest finite magnitude
    std::uint32_t finished;  // blocks of the launch
    float global_scale;      // the result
};

// result->global_scale = 2688 / the greatest finite magnitude of x, 1 where that is 0 (cpu::dynamic_global_scale()).
// Reads m, k, dtype, x and x_row_stride of the problem; any stride, x aligned to its elements.
cudaError_t dynamic_global_scale(const Problem& problem, DynamicScale* result, cudaStream_t stream);

// codes [m, k/2] and the scales of [m, ceil(k/16)], the padding of the swizzled layout zeroed; k is even. Reads what
// dynamic_global_scale() reads. codes and scales may lie at any byte, but swizzled scales at a multiple of 4.
// global_scale_out: where g is written to as well, or null.
cudaError_t quantize_activations(const Problem& problem, GlobalScale global_scale, ScaleLayout layout,
                                 std::uint8_t* codes, std::uint8_t* scales, cudaStream_t stream,
                                 float* global_scale_out = nullptr);

// The same into scratch of the stream, valid until the next such call on it. input_global_scale: 0 takes the dynamic
// one. May be captured; throws on a CUDA error.
struct QuantizedActivations {
    const std::uint8_t* codes = nullptr;  // at a multiple of 256 bytes, as the scales
    const std::uint8_t* scales = nullptr;
    GlobalScale global_scale;
};
QuantizedActivations quantize_to_scratch(const Problem& problem, float input_global_scale, ScaleLayout layout,
                                         cudaStream_t stream);

}  // namespace fp4linear::cuda
