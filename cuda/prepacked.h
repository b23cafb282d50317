// The prepacked layout of an NVFP4 weight on the GPU: one layout for the GEMV, the mma.sync GEMM and the wgmma GEMM.
//
// Units of 16 rows x 64 K, 576 contiguous bytes, stored [ceil(N/16)][K/64]: the 16 rows of a tile are one contiguous
// stream along K. A unit holds
//   512 B of codes: lane l of a warp reads 16 B at 16*l: word s (0..3) is its A fragment of mma.m16n8k16 (and a
//         quarter of wgmma's register A) for the 16 K of slice s, K in natural order: with g = l/4, t = l%4, pair p of
//         the word is register a_p: row g + 8*(p&1), K 16*s + 2*t + 8*(p>>1) in the low half and the next K in the
//         high;
//   64 B of scales: byte 8*g + 2*s + h is the raw E4M3 byte of row g + 8*h, K block s (a slice is one block of 16).
// In each half of a word, pair p has its sign at code_sign_bit[p] and its 3 magnitude bits at code_magnitude_shift[p]:
// each pair reaches the sign and exponent fields of bf16 (15; 8-6) by at most a shift, a multiply and a mask, 10
// operations a word instead of the 13 of the canonical order.
//
// A scale byte is kept as it is. Where its sign bit is set the signs of its 16 codes are flipped, so kernels
// read the magnitude alone; unpacking flips them back, so every byte pattern survives. Rows past N are zero.
// A NaN byte (magnitude 0x7F) reads as 480 in the kernels: the caller handles it (see prepack.h).
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define FP4LINEAR_HOST_DEVICE __host__ __device__
#else
#define FP4LINEAR_HOST_DEVICE
#endif

namespace fp4linear::cuda::prepacked {

inline constexpr int unit_rows = 16;
inline constexpr int unit_k = 64;
inline constexpr int slice_k = 16;  // K of one mma, and of one scale
inline constexpr int unit_slices = unit_k / slice_k;
inline constexpr int unit_code_bytes = unit_rows * unit_k / 2;
inline constexpr int unit_scale_bytes = unit_rows * unit_slices;
inline constexpr int unit_bytes = unit_code_bytes + unit_scale_bytes;

FP4LINEAR_HOST_DEVICE constexpr bool supports(std::int64_t k, int block_size) {
    return block_size == slice_k && k > 0 && k % unit_k == 0;
}
FP4LINEAR_HOST_DEVICE constexpr std::int64_t row_tiles(std::int64_t n) { return (n + unit_rows - 1) / unit_rows; }
FP4LINEAR_HOST_DEVICE constexpr std::int64_t k_units(std::int64_t k) { return k / unit_k; }
FP4LINEAR_HOST_DEVICE constexpr std::size_t size(std::int64_t n, std::int64_t k) {
    return static_cast<std::size_t>(row_tiles(n) * k_units(k)) * unit_bytes;
}

// Bit positions of pair p inside each half of a code word.
FP4LINEAR_HOST_DEVICE constexpr int code_sign_bit(int pair) {
    return pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13;
}
FP4LINEAR_HOST_DEVICE constexpr int code_magnitude_shift(int pair) {
    return pair == 0 ? 6 : pair == 1 ? 3 : pair == 2 ? 0 : 9;
}

struct CodePosition {
    std::int64_t word;  // byte offset of the 32-bit word from the start of the weight
    int sign_bit;       // in the word
    int magnitude_shift;
};

FP4LINEAR_HOST_DEVICE constexpr std::int64_t unit_offset(std::int64_t row, std::int64_t k, std::int64_t k_total) {
    return ((row / unit_rows) * k_units(k_total) + k / unit_k) * unit_bytes;
}

// Where the code of (row, k) lies.
FP4LINEAR_HOST_DEVICE constexpr CodePosition code_position(std::int64_t row, std::int64_t k, std::int64_t k_total) {
    const int r = static_cast<int>(row % unit_rows);
    const int c = static_cast<int>(k % slice_k);
    const int slice = static_cast<int>(k % unit_k) / slice_k;
    const int lane = (r % 8) * 4 + (c % 8) / 2;
    const int pair = r / 8 + 2 * (c / 8);
    const int half = c & 1;
    return {unit_offset(row, k, k_total) + lane * 16 + slice * 4, 16 * half + code_sign_bit(pair),
            16 * half + code_magnitude_shift(pair)};
}

FP4LINEAR_HOST_DEVICE constexpr std::uint32_t code_from_word(std::uint32_t word, int sign_bit, int magnitude_shift) {
    return ((word >> sign_bit) & 1u) << 3 | ((word >> magnitude_shift) & 7u);
}
FP4LINEAR_HOST_DEVICE constexpr std::uint32_t word_from_code(std::uint32_t code, int sign_bit, int magnitude_shift) {
    return ((code >> 3) & 1u) << sign_bit | (code & 7u) << magnitude_shift;
}

// Where the scale of (row, K block) lies, in bytes from the start of the weight.
FP4LINEAR_HOST_DEVICE constexpr std::int64_t scale_position(std::int64_t row, std::int64_t block,
                                                            std::int64_t k_total) {
    const int r = static_cast<int>(row % unit_rows);
    return unit_offset(row, block * slice_k, k_total) + unit_code_bytes + (r % 8) * 8 +
           static_cast<int>(block % unit_slices) * 2 + r / 8;
}

// The inverse: which element a unit's byte belongs to.
struct ElementOfUnit {
    int row;  // in the unit
    int k;    // in the unit
};
FP4LINEAR_HOST_DEVICE constexpr ElementOfUnit element_of_code(int lane, int slice, int pair, int half) {
    return {lane / 4 + 8 * (pair & 1), slice * slice_k + (lane % 4) * 2 + 8 * (pair >> 1) + half};
}
FP4LINEAR_HOST_DEVICE constexpr ElementOfUnit element_of_scale(int byte) {
    return {byte / 8 + 8 * (byte & 1), (byte % 8) / 2 * slice_k};
}

}  // namespace fp4linear::cuda::prepacked
