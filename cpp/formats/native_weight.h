// A weight as block-scaled tensor cores read it: codes [n, k/2] and scales in the 128x4 layout, padding zeroed.
//
// Their scales (UE4M3) have no sign. Where a canonical scale byte has one, the signs of its 16 codes are flipped
// instead, and the byte goes without; a NaN byte becomes 0x7F.
#pragma once
#include <algorithm>
#include <cstdint>

#include "formats/swizzle.h"

#ifdef __CUDACC__
#define FP4LINEAR_HOST_DEVICE __host__ __device__
#else
#define FP4LINEAR_HOST_DEVICE
#endif

namespace fp4linear::native_weight {

inline constexpr int block_size = 16;
inline constexpr std::uint8_t scale_sign = 0x80;

FP4LINEAR_HOST_DEVICE constexpr std::uint8_t scale(std::uint8_t canonical) {
    return static_cast<std::uint8_t>(canonical & ~scale_sign);
}
// Two codes in a byte.
FP4LINEAR_HOST_DEVICE constexpr std::uint8_t codes(std::uint8_t canonical, std::uint8_t canonical_scale) {
    return static_cast<std::uint8_t>(canonical ^ ((canonical_scale & scale_sign) != 0 ? 0x88 : 0));
}

constexpr std::int64_t row_blocks(std::int64_t k) { return (k + block_size - 1) / block_size; }

// Do the codes have to change?
inline bool has_signed_scale(const std::uint8_t* scales, std::int64_t count) {
    return std::any_of(scales, scales + count, [](std::uint8_t byte) { return (byte & scale_sign) != 0; });
}

// b [n, k/2], scales [n, ceil(k/16)], k even; out: codes_out [n, k/2], scales_out swizzle::size(n, ceil(k/16)) bytes.
// Either may be null.
inline void from_canonical(const std::uint8_t* b, const std::uint8_t* scales, std::int64_t n, std::int64_t k,
                           std::uint8_t* codes_out, std::uint8_t* scales_out) {
    const std::int64_t blocks = row_blocks(k);
    if (scales_out != nullptr) std::fill_n(scales_out, swizzle::size(n, blocks), std::uint8_t{0});
    for (std::int64_t row = 0; row < n; ++row) {
        const std::uint8_t* const of_row = scales + row * blocks;
        for (std::int64_t c = 0; scales_out != nullptr && c < blocks; ++c)
            scales_out[swizzle::offset(row, c, blocks)] = scale(of_row[c]);
        for (std::int64_t i = row * (k / 2), byte = 0; codes_out != nullptr && byte < k / 2; ++i, ++byte)
            codes_out[i] = codes(b[i], of_row[2 * byte / block_size]);
    }
}

}  // namespace fp4linear::native_weight
