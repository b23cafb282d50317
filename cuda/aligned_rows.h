// x where kernels load 16 bytes in one piece.
#pragma once
#include <cuda_runtime_api.h>

#include "problem.h"

namespace fp4linear::cuda {

inline constexpr std::int64_t row_alignment = 16;  // bytes: of cp.async, and of a TMA tensor's rows

// Does x itself start at such an address?
bool starts_aligned(const Problem& problem);
// A copy of x [m, k], C-contiguous and aligned, in scratch of the stream; 16-bit types.
const void* aligned_copy(const Problem& problem, cudaStream_t stream);

}  // namespace fp4linear::cuda
