#include "cuda/native_nvfp4.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda/check.h"
#include "cuda/native_kernels.h"
#include "cuda/quantize_activations.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {

void native_nvfp4(const DeviceWeight& w, const Problem& p, float input_global_scale, cudaStream_t stream) {
    const NativeKernels* const kernels = native_kernels(w.facts.sm);
    if (kernels == nullptr || w.swizzled_scales() == nullptr)
        throw std::logic_error("native_nvfp4: the layer was not made for it");
    // TMA writes at multiples of 16 bytes; a caller's out= may begin at any element.
    constexpr std::uintptr_t alignment = 16;
    const bool aligned = reinterpret_cast<std::uintptr_t>(p.y) % alignment == 0;
    const std::size_t y_bytes = static_cast<std::size_t>(p.m * p.n) * size_of(p.dtype);
    void* const y = aligned ? p.y : scratch(Scratch::native_y, y_bytes, stream);
    const QuantizedActivations x = quantize_to_scratch(p, input_global_scale, ScaleLayout::swizzled, stream);
    const NativeArguments a{.m = p.m,
                            .n = p.n,
                            .k = p.k,
                            .dtype = p.dtype,
                            .x_codes = x.codes,
                            .x_scales = x.scales,
                            .weight_codes = w.native_codes(),
                            .weight_scales = w.swizzled_scales(),
                            .y = y,
                            .scale2 = w.scale2,
                            .scale2_rows = w.scale2_rows(),
                            .global_scale = x.global_scale.value,
                            .global_scale_on_device = x.global_scale.device,
                            .bias = w.bias(),
                            .device = w.device,
                            .sm_count = w.facts.sm_count};
    if (const char* why = kernels->cannot(a)) throw std::invalid_argument(std::string("native_nvfp4: CUTLASS: ") + why);
    const std::size_t bytes = kernels->workspace(a);
    void* const workspace = bytes == 0 ? nullptr : scratch(Scratch::native_gemm, bytes, stream);
    FP4LINEAR_CUDA_CHECK(kernels->run(a, workspace, stream));
    if (!aligned) FP4LINEAR_CUDA_CHECK(cudaMemcpyAsync(p.y, y, y_bytes, cudaMemcpyDeviceToDevice, stream));
}

}  // namespace fp4linear::cuda
