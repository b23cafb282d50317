// Scratch memory of the paths that need some. Calls on one stream share it, in order; calls on different streams never
// do, nor do two graphs, which may be replayed at the same time wherever they were captured.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace fp4linear::cuda {

enum class Scratch : std::uint8_t {
    dequantized,     // one chunk of the weight in 16 bits
    cublas,          // what cuBLASLt asks for
    gemv_partials,   // sums of K slices
    mma_partials,    // sums of K slices of gemm_fused
    wgmma_partials,  // the same, with flags that are zero at first and that every launch leaves so
    aligned_x,       // a copy of x whose rows start at multiples of 16 bytes
    native_codes,    // x quantised to NVFP4
    native_scales,   // its block scales
    native_factors,  // its global scale, and what is worked out from that
    native_weight,   // a chunk of the weight in canonical form
    native_gemm,     // what CUTLASS asks for
    native_y,        // y, where the caller's is not aligned
};

// At least `bytes` for work that is put on the stream of the current device. Allocates on the first call of a stream or
// of a capture and when a call needs more than any before; the memory of a stream is kept for ever (a stream made later
// that gets the handle of one that is gone gets its memory too), that of a capture goes to the next one when its graph
// is destroyed.
void* scratch(Scratch purpose, std::size_t bytes, cudaStream_t stream);

}  // namespace fp4linear::cuda
