// Up to eight tokens of the streaming GEMV: their x as mma operands, and a chunk of the weight times it.
#pragma once
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemv_parameters.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device {

using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_k;

// Bytes of a staged row of 64 K: 128 + 16, so that ldmatrix meets no bank conflict.
inline constexpr int x_row_pitch = 144;
inline constexpr int x_scratch_bytes = 8 * x_row_pitch;

// The x of a K range in registers, as B operands; up to 8 tokens, rows past M are zero.
template <int Units, int ChunkUnits>
struct EightTokens {
    // For x on its way to registers, and for the decoded scales of a chunk.
    static constexpr int scratch_bytes = 128 * ChunkUnits > x_scratch_bytes ? 128 * ChunkUnits : x_scratch_bytes;
    std::uint32_t b[Units * 4][2];

    __device__ static __forceinline__ std::uint32_t prescale(std::uint32_t pair, BFloat16) {
        return BFloat16::multiply(pair, 0x48004800u /* 2^17: with the weight's 2^-7, 2^10 */);
    }
    __device__ static __forceinline__ std::uint32_t prescale(std::uint32_t pair, Float16) { return pair; }

    template <class T, class AfterRequests>
    __device__ __forceinline__ void load(const GemvParameters& p, std::int64_t k_begin, std::int64_t k_end,
                                         std::uint32_t scratch, int lane, const AfterRequests& after_requests) {
        if (p.x_aligned) {
            // Rows of 64 K are read 16 bytes a lane, and turned into operands through shared memory.
            uint4 staged[Units][2];
#pragma unroll
            for (int u = 0; u < Units; ++u)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = lane / 8 + 4 * i;
                    const std::int64_t k = k_begin + u * unit_k + (lane % 8) * 8;
                    staged[u][i] = make_uint4(0, 0, 0, 0);
                    if (token < p.m && k < k_end)
                        staged[u][i] = *reinterpret_cast<const uint4*>(p.x + token * p.x_row_stride + k);
                }
            after_requests();
#pragma unroll
            for (int u = 0; u < Units; ++u) {
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    store_shared_128(scratch + (lane / 8 + 4 * i) * x_row_pitch + (lane % 8) * 16, staged[u][i]);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const uint4 two_slices =
                        load_matrix_x4(scratch + (lane % 8) * x_row_pitch + (4 * i + lane / 8) * 16);
                    b[u * 4 + 2 * i][0] = two_slices.x;
                    b[u * 4 + 2 * i][1] = two_slices.y;
                    b[u * 4 + 2 * i + 1][0] = two_slices.z;
                    b[u * 4 + 2 * i + 1][1] = two_slices.w;
                }
            }
        } else {
            after_requests();
            const int token = lane / 4;
#pragma unroll
            for (int s = 0; s < Units * 4; ++s)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const std::int64_t k = k_begin + s * prepacked::slice_k + 8 * h + 2 * (lane % 4);
                    b[s][h] = 0;
                    if (token < p.m && k < k_end) {
                        const std::uint16_t* source = p.x + token * p.x_row_stride + k;
                        b[s][h] = source[0] | static_cast<std::uint32_t>(source[1]) << 16;
                    }
                }
        }
        __syncwarp();  // the staging area is used again
#pragma unroll
        for (int s = 0; s < Units * 4; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h) b[s][h] = prescale(b[s][h], T{});
    }

    // `scratch`: 128 bytes a unit. The four lanes of a row need the same scales, so each scale is decoded by one lane
    // and shared. SkipLast: a K range may be a unit short.
    template <class T, bool SkipLast>
    __device__ __forceinline__ void multiply_chunk(float (&acc)[2][4], int first_unit, int units, std::uint32_t chunk,
                                                   std::uint32_t scratch, int lane) const {
        static_assert(ChunkUnits * 128 <= scratch_bytes);
#pragma unroll
        for (int first = 0; first < ChunkUnits * 8; first += 32) {
            const int i = first + lane;  // unit i / 8, rows i % 8 and 8 more
            if (i < ChunkUnits * 8) {
                const uint2 bytes = load_shared_64(chunk + (i / 8) * unit_bytes + unit_code_bytes + (i % 8) * 8);
                store_shared_128(scratch + i * 16, make_uint4(T::scale_pair(bytes.x, 0), T::scale_pair(bytes.y, 0),
                                                              T::scale_pair(bytes.x, 1), T::scale_pair(bytes.y, 1)));
            }
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < ChunkUnits; ++u) {
            if (SkipLast && first_unit + u == Units - 1 && units < Units) break;
            const uint4 codes = load_shared_128(chunk + u * unit_bytes + lane * 16);
            const uint4 scales = load_shared_128(scratch + u * 128 + (lane / 4) * 16);
            const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const std::uint32_t g = twice(i < 2 ? scales.x : scales.y, i % 2 != 0);
                const std::uint32_t g8 = twice(i < 2 ? scales.z : scales.w, i % 2 != 0);
                std::uint32_t a[4];
                T::decode(words[i], a);
                a[0] = T::multiply(a[0], g);
                a[1] = T::multiply(a[1], g8);
                a[2] = T::multiply(a[2], g);
                a[3] = T::multiply(a[3], g8);
                const int s = (first_unit + u) * 4 + i;
                T::mma(acc[i % 2], a, b[s][0], b[s][1]);  // two chains: one would be bound by the latency of mma
            }
        }
    }
};

}  // namespace fp4linear::cuda::device
