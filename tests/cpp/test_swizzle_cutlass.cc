// The 128x4 scale layout against CUTLASS's own layout algebra (Sm1xxBlockScaledConfig), evaluated on the host.
#include <cutlass/detail/sm100_blockscaled_layout.hpp>

#include <cstdint>
#include <cstdio>

#include "formats/swizzle.h"

namespace {

constexpr int block_size = 16;

// Compares every scale of a [rows, blocks] matrix, and the size; returns the number of points, or -1 on a difference.
std::int64_t compare(int rows, int blocks) {
    using Config = cutlass::detail::Sm1xxBlockScaledConfig<block_size>;
    const int k = blocks * block_size;
    const auto layout = Config::tile_atom_to_shape_SFA(cute::make_shape(rows, rows, k, 1));

    const std::int64_t size = cute::cosize(layout);
    if (size != fp4linear::swizzle::size(rows, blocks)) {
        std::printf("size of [%d, %d]: %lld, CUTLASS has %lld\n", rows, blocks,
                    static_cast<long long>(fp4linear::swizzle::size(rows, blocks)), static_cast<long long>(size));
        return -1;
    }
    for (int row = 0; row < rows; ++row) {
        for (int block = 0; block < blocks; ++block) {
            const std::int64_t ours = fp4linear::swizzle::offset(row, block, blocks);
            // Both ends of a block: its 16 elements share one scale.
            for (const int element : {block * block_size, block * block_size + block_size - 1}) {
                const std::int64_t theirs = layout(row, element, 0);
                if (ours == theirs) continue;
                std::printf("[%d, %d] at (%d, %d): %lld, CUTLASS has %lld\n", rows, blocks, row, block,
                            static_cast<long long>(ours), static_cast<long long>(theirs));
                return -1;
            }
        }
    }
    return static_cast<std::int64_t>(rows) * blocks;
}

}  // namespace

int main() {
    std::int64_t points = 0;
    for (const int rows : {1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 384, 500, 1024, 1537}) {
        for (const int blocks : {1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 100}) {
            const std::int64_t compared = compare(rows, blocks);
            if (compared < 0) return 1;
            points += compared;
        }
    }
    std::printf("%lld scales agree\n", static_cast<long long>(points));
    return points > 0 ? 0 : 1;
}
