// The native NVFP4 x NVFP4 path's arithmetic on the host: activations quantised to blocks of 16, and the layer that
// multiplies them (path native_emulated).
#pragma once
#include <cstdint>

#include "cpu/cpu.h"
#include "formats/swizzle.h"
#include "problem.h"

namespace fp4linear::cpu {

// The global scale of x (reciprocal convention) that fills the range: 2688 / the greatest finite magnitude of x, 1
// where that is 0. Infinities and NaN do not count: they spoil their own block and nothing else. Reads m, k, dtype, x
// and x_row_stride of the problem.
float dynamic_global_scale(const Problem& problem, int threads);

// x as NVFP4 by formats/activation.h: codes [m, k/2], two a byte, the even k in the low nibble, and scales of
// [m, ceil(k/16)]; k is even. Reads what dynamic_global_scale() reads. global_scale is finite and > 0.
void quantize_activations(const Problem& problem, float global_scale, ScaleLayout layout, int threads,
                          std::uint8_t* codes, std::uint8_t* scales);

// y = round(scale2 / g * sum over blocks of K, ascending, in fp32, of (xs * ws * sum of the 16 products) + bias). What
// is added for a block has at most 20 significant bits and is exact; the epilogue is fp64. So y's bits depend on
// nothing but its row of x, its row of the weight and g. The weight has block_size 16. global_scale: g, or 0 for
// dynamic_global_scale() of this call.
void run_native_emulated(const WeightView& weight, const Problem& problem, const Epilogue& epilogue, float global_scale,
                         int threads);

}  // namespace fp4linear::cpu
