// The 128x4 layout of block scales that Blackwell's block-scaled MMA reads: rows padded to 128 and K blocks
// to 4, in atoms of 128 rows x 4 blocks = 512 bytes (CUTLASS Sm1xxBlockScaledConfig; cuBLAS "1D block scaling").
#pragma once
#include <algorithm>
#include <cstdint>

#ifdef __CUDACC__
#define FP4LINEAR_HOST_DEVICE __host__ __device__
#else
#define FP4LINEAR_HOST_DEVICE
#endif

namespace fp4linear {

// How the block scales of a matrix are laid out.
enum class ScaleLayout : std::uint8_t {
    plain,     // [rows, blocks], row-major
    swizzled,  // 128x4, padding zeroed
};

}  // namespace fp4linear

namespace fp4linear::swizzle {

inline constexpr std::int64_t atom_rows = 128;
inline constexpr std::int64_t atom_blocks = 4;
inline constexpr std::int64_t atom_bytes = atom_rows * atom_blocks;

FP4LINEAR_HOST_DEVICE constexpr std::int64_t padded_rows(std::int64_t rows) {
    return (rows + atom_rows - 1) / atom_rows * atom_rows;
}
FP4LINEAR_HOST_DEVICE constexpr std::int64_t padded_blocks(std::int64_t blocks) {
    return (blocks + atom_blocks - 1) / atom_blocks * atom_blocks;
}
FP4LINEAR_HOST_DEVICE constexpr std::int64_t size(std::int64_t rows, std::int64_t blocks) {
    return padded_rows(rows) * padded_blocks(blocks);
}

// Byte offset of the scale of (row, block) in a matrix that has `blocks` K blocks a row.
FP4LINEAR_HOST_DEVICE constexpr std::int64_t offset(std::int64_t row, std::int64_t block, std::int64_t blocks) {
    const std::int64_t atoms_a_row = padded_blocks(blocks) / atom_blocks;
    const std::int64_t atom = (row / atom_rows) * atoms_a_row + block / atom_blocks;
    const std::int64_t row_in_atom = row % atom_rows;
    return atom * atom_bytes + (row_in_atom % 32) * 16 + (row_in_atom / 32) * 4 + block % atom_blocks;
}

// plain: [rows, blocks] row-major. swizzled: size(rows, blocks) bytes, padding zeroed.
inline void from_plain(const std::uint8_t* plain, std::int64_t rows, std::int64_t blocks, std::uint8_t* swizzled) {
    std::fill_n(swizzled, size(rows, blocks), std::uint8_t{0});
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < blocks; ++c) swizzled[offset(r, c, blocks)] = plain[r * blocks + c];
}
inline void to_plain(const std::uint8_t* swizzled, std::int64_t rows, std::int64_t blocks, std::uint8_t* plain) {
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < blocks; ++c) plain[r * blocks + c] = swizzled[offset(r, c, blocks)];
}

}  // namespace fp4linear::swizzle
