// Float weights to NVFP4.
#pragma once
#include <cstdint>

namespace fp4linear {

enum class QuantizeMethod : std::uint8_t {
    max_abs,        // a block's greatest value becomes 6
    four_over_six,  // or 4, where that gives the smaller squared error (arXiv 2512.02010)
    mse,            // the E4M3 scale of the smallest squared error among those near the max-abs one
};

// The fp32 global scale of a tensor whose greatest magnitude is amax: the block scale of that magnitude becomes 448
// (256 for four_over_six, so that a block which maps its maximum to 4 still fits). 1 where amax is 0.
float global_scale(float amax, QuantizeMethod method);

// w: [n, k] fp32, C-contiguous, finite. Fills b [n, k/2] and scales [n, ceil(k/16)]. k is even.
void quantize(std::int64_t n, std::int64_t k, const float* w, QuantizeMethod method, float scale2, std::uint8_t* b,
              std::uint8_t* scales);

}  // namespace fp4linear
