// The quantiser with memory of the stream's own, and for callers without CUDA headers.
#include "cuda/quantize_activations.h"

#include "cuda/check.h"
#include "cuda/weight.h"
#include "cuda/workspace.h"
#include "formats/activation.h"

namespace fp4linear::cuda {
namespace {

GlobalScale global_scale_of(const Problem& problem, float given, cudaStream_t stream) {
    if (given != 0.0f) return {.value = given, .device = nullptr};
    auto* const dynamic = static_cast<DynamicScale*>(scratch(Scratch::native_factors, sizeof(DynamicScale), stream));
    FP4LINEAR_CUDA_CHECK(dynamic_global_scale(problem, dynamic, stream));
    return {.value = 1.0f, .device = &dynamic->global_scale};
}

std::uint8_t* bytes_for(Scratch purpose, std::int64_t bytes, cudaStream_t stream) {
    return static_cast<std::uint8_t*>(scratch(purpose, static_cast<std::size_t>(bytes), stream));
}

}  // namespace

QuantizedActivations quantize_to_scratch(const Problem& problem, float input_global_scale, ScaleLayout layout,
                                         cudaStream_t stream) {
    const std::int64_t blocks = blocks_per_row(problem.k, activation::block_size);
    const std::int64_t scale_bytes =
        layout == ScaleLayout::swizzled ? swizzle::size(problem.m, blocks) : problem.m * blocks;
    std::uint8_t* const codes = bytes_for(Scratch::native_codes, problem.m * (problem.k / 2), stream);
    std::uint8_t* const scales = bytes_for(Scratch::native_scales, scale_bytes, stream);
    const GlobalScale g = global_scale_of(problem, input_global_scale, stream);
    FP4LINEAR_CUDA_CHECK(quantize_activations(problem, g, layout, codes, scales, stream));
    return {.codes = codes, .scales = scales, .global_scale = g};
}

void quantize_activations(const Problem& problem, float global_scale, ScaleLayout layout, std::uint8_t* codes,
                          std::uint8_t* scales, float* global_scale_out, void* stream) {
    const auto s = static_cast<cudaStream_t>(stream);
    const GlobalScale g = global_scale_of(problem, global_scale, s);
    FP4LINEAR_CUDA_CHECK(quantize_activations(problem, g, layout, codes, scales, s, global_scale_out));
}

}  // namespace fp4linear::cuda
