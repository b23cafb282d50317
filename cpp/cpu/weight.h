// What a Weight holds.
#pragma once
#include "cpu/aligned_buffer.h"
#include "cpu/cpu.h"
#include "cpu/layout.h"

namespace fp4linear::cpu {

struct Weight::Impl {
    std::int64_t n = 0;
    std::int64_t k = 0;
    int block_size = 16;

    std::int64_t tiles = 0;  // of 16 rows
    std::int64_t steps = 0;  // of 64 K

    // Tiled (layout.h) where every group of 16 K lies inside one block: block_size a multiple of 16, or one
    // block a row. Otherwise `codes` and `scales` are the canonical arrays, and panels are decoded from them.
    bool tiled = true;
    // No scale has a sign or is NaN, which is so in every usual checkpoint: the cheaper scale decode is right.
    bool plain_scales = true;
    AlignedBuffer codes;
    AlignedBuffer scales;
    std::size_t bytes_held = 0;

    [[nodiscard]] const std::uint8_t* tile(std::int64_t index) const {
        return codes.bytes() + static_cast<std::size_t>(index * steps) * step_bytes;
    }
};

// Decodes 16 rows of a canonical (not tiled) weight, k in [64 * first_step, 64 * last_step), multiplied by
// 1 / sum_factor as the tiled kernels do: bf16 pairs [k/2][16][2] where `pairs`, else fp32 [k][16].
void decode_canonical_panel(const Weight::Impl& weight, std::int64_t tile, std::int64_t first_step,
                            std::int64_t last_step, bool pairs, void* panel);

}  // namespace fp4linear::cpu
