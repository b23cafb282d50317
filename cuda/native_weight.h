// formats/native_weight.h on the device, the same bytes.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fp4linear::cuda {

// From canonical b [n, k/2] and scales [n, ceil(k/16)]; k is even. codes [n, k/2] and swizzled
// [swizzle::size(n, ceil(k/16))], or null where not wanted. All on the device; n and k > 0.
cudaError_t native_weight_from_canonical(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n,
                                         std::int64_t k, std::uint8_t* codes, std::uint8_t* swizzled,
                                         cudaStream_t stream);

// The scales from a prepacked weight (prepacked.h).
cudaError_t native_scales_from_prepacked(const std::uint8_t* prepacked, std::int64_t n, std::int64_t k,
                                         std::uint8_t* swizzled, cudaStream_t stream);

}  // namespace fp4linear::cuda
