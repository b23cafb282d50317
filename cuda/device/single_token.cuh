// One token of the streaming GEMV: its x as mma operands, and a chunk of the weight times it.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemv_parameters.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device {

using prepacked::unit_bytes;
using prepacked::unit_code_bytes;

// The x of a K range [k_begin, k_end) in registers, as B operands; M = 1. Lane (g, t) holds slices g, g + 8, ...: the
// others are zero in its column.
template <int Units>
struct SingleToken {
    static constexpr int pairs = (Units + 1) / 2;  // of units: eight slices
    std::uint32_t b[pairs][2];
    int output_exponent = 0;  // what the sums must be multiplied by, 2^output_exponent
    bool lift = false;

    __device__ __forceinline__ void load(const GemvParameters& p, std::int64_t k_begin, std::int64_t k_end, int lane) {
        const int g = lane / 4;
        const int t = lane % 4;
#pragma unroll
        for (int j = 0; j < pairs; ++j) {
            const std::int64_t k = k_begin + (8 * j + g) * prepacked::slice_k + 2 * t;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                b[j][h] = 0;
                if (k < k_end) {
                    const std::uint16_t* source = p.x + k + 8 * h;
                    b[j][h] = p.x_aligned ? *reinterpret_cast<const std::uint32_t*>(source)
                                          : source[0] | static_cast<std::uint32_t>(source[1]) << 16;
                }
            }
        }
    }

    __device__ __forceinline__ void normalise(BFloat16) {
        std::uint32_t largest = 0;             // of |x| as bits, two at a time
        std::uint32_t smallest = 0xFFFFFFFFu;  // of the nonzero ones, minus 1
#pragma unroll
        for (int j = 0; j < pairs; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const std::uint32_t magnitudes = b[j][h] & 0x7FFF7FFFu;
                largest = __vmaxu2(largest, magnitudes);
                smallest = __viaddmin_u16x2(magnitudes, 0xFFFFFFFFu, smallest);
            }
        std::uint32_t top = __reduce_max_sync(0xFFFFFFFFu, max(largest & 0xFFFFu, largest >> 16));
        const std::uint32_t bottom = __reduce_min_sync(0xFFFFFFFFu, min(smallest & 0xFFFFu, smallest >> 16)) + 1;
        if (top >= 0x7F80u) {  // Inf or NaN: what counts is the largest finite value
            std::uint32_t finite = 0;
#pragma unroll
            for (int j = 0; j < pairs; ++j)
#pragma unroll
                for (int h = 0; h < 4; ++h) {
                    const std::uint32_t magnitude = (b[j][h / 2] >> (h % 2 * 16)) & 0x7FFFu;
                    if (magnitude < 0x7F80u) finite = max(finite, magnitude);
                }
            top = __reduce_max_sync(0xFFFFFFFFu, finite);
        }
        const int top_field = static_cast<int>(top >> 7);
        const int bottom_field = bottom < 0x80u ? -6 : static_cast<int>(bottom >> 7);  // 2^-133 is the least subnormal
        lift = bottom_field < top_field - 125;
        const int shift = lift ? 2 : 120 + 127 - top_field;
        output_exponent = lift ? 0 : 129 - shift;  // sums are w * x * 2^(shift - 119); wanted: * 2^10
        const int first = shift / 2;
        const std::uint32_t multiplier0 = static_cast<std::uint32_t>(first + 127) * 0x00800080u;
        const std::uint32_t multiplier1 = static_cast<std::uint32_t>(shift - first + 127) * 0x00800080u;
#pragma unroll
        for (int j = 0; j < pairs; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                b[j][h] = BFloat16::multiply(BFloat16::multiply(b[j][h], multiplier0), multiplier1);
    }
    __device__ __forceinline__ void normalise(Float16) {}

    // acc[0], acc[1]: this lane's share of rows g and g + 8.
    // SkipLast: a K range may be a pair of units short.
    template <class T, bool Lift, int ChunkUnits, bool KeepMasked, bool SkipLast>
    __device__ __forceinline__ void multiply_chunk(float (&acc)[2], int first_unit, int units, std::uint32_t chunk,
                                                   int lane) const {
        int g = lane / 4;
        if constexpr (!KeepMasked)
            asm volatile("" : "+r"(g));  // or every masked operand is kept in registers across tiles
        const int t = lane % 4;
        constexpr float scale_factor = T::code_exponent == -126 ? 0x1p127f : 0x1p120f;
#pragma unroll
        for (int u = 0; u < ChunkUnits; u += 2) {
            if (SkipLast && first_unit + u == Units - 2 && units <= Units - 2) break;
            const bool both = u + 1 < ChunkUnits;
            const int j = (first_unit + u) / 2;
            const std::uint32_t unit = chunk + u * unit_bytes;
            const std::uint32_t scale_word =
                load_shared_32(unit + (both ? (t >> 1) * unit_bytes : 0) + unit_code_bytes + g * 8 + (t & 1) * 4);
            // Two chains of mma where the latency of one would show.
            constexpr int chains = KeepMasked ? 1 : 2;
            float sums[chains][4] = {};
            const uint4 codes[2] = {load_shared_128(unit + lane * 16),
                                    both ? load_shared_128(unit + unit_bytes + lane * 16) : make_uint4(0, 0, 0, 0)};
            const std::uint32_t words[2][4] = {{codes[0].x, codes[0].y, codes[0].z, codes[0].w},
                                               {codes[1].x, codes[1].y, codes[1].z, codes[1].w}};
#pragma unroll
            for (int s = 0; s < 4; ++s)
#pragma unroll
                for (int half = 0; half < (both ? 2 : 1); ++half) {
                    std::uint32_t a[4];
                    T::decode(words[half][s], a);
                    if constexpr (Lift) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) a[i] = T::multiply(a[i], 0x7F007F00u /* 2^127 */);
                    }
                    const bool mine = g == (first_unit + u + half) % 2 * 4 + s;
                    T::mma(sums[half % chains], a, mine ? b[j][0] : 0u, mine ? b[j][1] : 0u);
                }
            float d[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) d[i] = chains == 2 && both ? sums[0][i] + sums[chains - 1][i] : sums[0][i];
            acc[0] = fmaf(d[0], scale_magnitude(scale_word, 0) * scale_factor, acc[0]);
            acc[0] = fmaf(d[1], scale_magnitude(scale_word, 2) * scale_factor, acc[0]);
            acc[1] = fmaf(d[2], scale_magnitude(scale_word, 1) * scale_factor, acc[1]);
            acc[1] = fmaf(d[3], scale_magnitude(scale_word, 3) * scale_factor, acc[1]);
        }
    }
};

}  // namespace fp4linear::cuda::device
