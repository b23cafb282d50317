// How the paths read a WeightView.
#pragma once
#include "cpu/cpu.h"
#include "cpu/layout.h"

namespace fp4linear::cpu {

inline const std::uint8_t* tile_of(const WeightView& weight, std::int64_t index) {
    return weight.codes + static_cast<std::size_t>(index * weight.steps) * step_bytes;
}

// Decodes 16 rows of a canonical (not tiled) weight, k in [64 * first_step, 64 * last_step), multiplied by
// 1 / sum_factor as the tiled kernels do: bf16 pairs [k/2][16][2] where `pairs`, else fp32 [k][16].
void decode_canonical_panel(const WeightView& weight, std::int64_t tile, std::int64_t first_step,
                            std::int64_t last_step, bool pairs, void* panel);

}  // namespace fp4linear::cpu
