// gemm_fused for up to 32 tokens, where there is wgmma for up to 8, with mma.m16n8k16: bound by reading and decoding
// the weight.
//
// A cluster of blocks owns a range of row tiles, each of its blocks one part of K, whose x (every token) it keeps in
// shared memory. A block's weight units, in the order (row tiles, K), are one list that is dealt out evenly to its
// warps: a warp works on a contiguous part, through its own ring of bulk copies, and waits for nobody. It decodes a
// unit into A operands and takes x by ldmatrix as B.
//
// A row tile's sum may thus come from several warps and blocks. Each warp's last sum stays in registers until the end,
// those before it go to their row tiles' slots (they are complete, or lack only other warps' last sums; without a
// cluster a complete one is stored as y at once). At the end a block adds what belongs together in the order of K, and
// the tile's owner adds the blocks' sums in the order of their ranks.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/gemm_mma.cuh"
#include "cuda/device/gemm_stream.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm.h"
#include "cuda/gemm_mma.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using namespace device::gemm_stream;

constexpr int cp_async_stages = 2;  // before SM90: cp.async.wait_group takes a constant

struct StreamParameters {
    GemmOutput out;
    int m;
    Parts parts;
    int x_pitch;  // bytes of a row of x in shared memory: 16 more than a multiple of 128
    int x_offset;
    int scales_offset;
    int slots_offset;
    int flags_offset;
    int table_offset;
    int barriers_offset;
};

// One unit. x_two_tiles: a lane's ldmatrix address of two token tiles' operands of a slice; x_two_slices: of the last
// token tile's of two slices.
template <class T, int TokenTiles>
__device__ __forceinline__ void multiply_unit(float (&acc)[TokenTiles][4], std::uint32_t unit, std::uint32_t scales,
                                              std::uint32_t x_two_tiles, std::uint32_t x_two_slices, int x_pitch,
                                              int lane) {
    const uint4 codes = load_shared_128(unit + lane * 16);
    const uint4 row_scales = load_shared_128(scales);
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint4 odd{};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        std::uint32_t b[TokenTiles][2];
#pragma unroll
        for (int i = 0; i + 1 < TokenTiles; i += 2) {
            const uint4 v = load_matrix_x4(x_two_tiles + i * 8 * x_pitch + s * 32);
            b[i][0] = v.x, b[i][1] = v.y, b[i + 1][0] = v.z, b[i + 1][1] = v.w;
        }
        if constexpr (TokenTiles % 2 != 0) {
            if (s % 2 == 0) odd = load_matrix_x4(x_two_slices + s * 32);
            b[TokenTiles - 1][0] = s % 2 == 0 ? odd.x : odd.z;
            b[TokenTiles - 1][1] = s % 2 == 0 ? odd.y : odd.w;
        }
        std::uint32_t a[4];
        decode_slice<T>(words[s], row_scales, s, a);
#pragma unroll
        for (int i = 0; i < TokenTiles; ++i) T::mma(acc[i], a, b[i][0], b[i][1]);
    }
}

template <class T, int TokenTiles, bool Clustered>
__global__ void __launch_bounds__(warps * 32, 1) stream_kernel(const __grid_constant__ StreamParameters p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) std::uint8_t shared[];
    constexpr int sum_bytes = TokenTiles * fragment_bytes;  // of a row tile
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    const std::uint32_t base = shared_address(shared);
    int rank = 0;
    [[maybe_unused]] int ranks = 1;
#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) {
        rank = static_cast<int>(cluster_rank());
        ranks = 1 << p.parts.cluster_shift;
    }
#endif
    launch_dependents();
    const Block block(p.parts, static_cast<int>(blockIdx.x) >> (Clustered ? p.parts.cluster_shift : 0), rank);
    const int first_tile = block.first_tile;
    const int tiles = block.tiles;
    const int k_units = block.k_units;
    const int length = tiles * k_units;
    const int begin = length * warp / warps;
    const int end = length * (warp + 1) / warps;
    const int first_of_warp = block.over_k_units(begin);
    int k = begin - first_of_warp * k_units;
    const std::int64_t tile_bytes = static_cast<std::int64_t>(p.parts.k_units) * unit_bytes;
    const int ring_bytes = p.parts.stages * chunk_bytes;
    const std::uint32_t ring_address = base + warp * ring_bytes;
    const std::uint32_t stage_barriers = base + p.barriers_offset + warp * p.parts.stages * 8;
    [[maybe_unused]] const std::uint32_t inbox_barrier = base + p.barriers_offset + warps * p.parts.stages * 8;
    WeightRing ring{p.out.source.weight + (static_cast<std::int64_t>(first_tile) + first_of_warp) * tile_bytes +
                        static_cast<std::int64_t>(block.first_k_unit + k) * unit_bytes,
                    tile_bytes - static_cast<std::int64_t>(k_units) * unit_bytes, k_units, end - begin, k_units - k};
#if __CUDA_ARCH__ >= 900
    init_ring_barriers(stage_barriers, p.parts.stages, lane);
#endif
    __syncwarp();
    // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
#pragma unroll 1
    for (int s = 0; s < p.parts.early_stages; ++s)
        ring.request(ring_address + s * chunk_bytes, stage_barriers + s * 8, lane);
    wait_for_previous_grid();

    copy_x(p.out.source, p.m, block, warp, lane, [&](int token) {
        const std::uint32_t to = base + p.x_offset + token * p.x_pitch;
        return [=](int i) { return to + i * 16; };
    });
#pragma unroll 1
    for (int s = p.parts.early_stages; s < p.parts.stages; ++s)
        ring.request(ring_address + s * chunk_bytes, stage_barriers + s * 8, lane);

    // While x is on its way: which warps have a share of a tile, first to last (bit 7: whose share is in a slot).
    std::uint8_t* const first_warp = shared + p.table_offset;
    std::uint8_t* const last_warp = first_warp + tiles;
    if (begin < end && lane == 0) {
        int tile = first_of_warp;
        int tile_end = (tile + 1) * k_units;
        if (k == 0) first_warp[tile] = static_cast<std::uint8_t>(warp);
        for (; tile_end < end; tile_end += k_units) {
            last_warp[tile] = static_cast<std::uint8_t>(warp | 0x80);
            first_warp[++tile] = static_cast<std::uint8_t>(warp);
        }
        if (tile_end == end) last_warp[tile] = static_cast<std::uint8_t>(warp);
    }
    [[maybe_unused]] unsigned long long* const flags = reinterpret_cast<unsigned long long*>(shared + p.flags_offset);
    if constexpr (!Clustered)
        for (int i = threadIdx.x; i < tiles; i += warps * 32) flags[i] = 0;
#if __CUDA_ARCH__ >= 900
    const int owned = (tiles - rank + ranks - 1) >> (Clustered ? p.parts.cluster_shift : 0);  // tiles: every ranks-th
    if (Clustered && warp == warps - 1 && lane == 0) {
        mbarrier_init(inbox_barrier, 1);
        fence_mbarrier_init();
        mbarrier_expect_bytes(inbox_barrier, (ranks - 1) * owned * sum_bytes);
    }
    async_copy_wait<0>();
#else
    async_copy_wait<cp_async_stages>();
#endif
    __syncthreads();

    const std::uint32_t x_base = base + p.x_offset + lane % 8 * p.x_pitch;
    const std::uint32_t x_two_tiles = x_base + lane / 16 * 8 * p.x_pitch + lane / 8 % 2 * 16;
    const std::uint32_t x_two_slices = x_base + (TokenTiles - 1) * 8 * p.x_pitch + lane / 8 * 16;
    const std::uint32_t scratch = base + p.scales_offset + warp * scale_bytes;
    const std::uint32_t lane_scales = scratch + lane / 4 * 16;
    std::uint32_t chunk = ring_address;
    [[maybe_unused]] std::uint32_t barrier = stage_barriers;
    [[maybe_unused]] std::uint32_t phase = 0;
    const std::uint32_t ring_end = ring_address + ring_bytes;
    float acc[TokenTiles][4] = {};
    float head[TokenTiles][4];  // without a cluster: the first sum, where other warps have a share of it
    int position = begin;
    int tile = first_of_warp;
    bool last_is_stored = false;  // a warp without work has a sum of zeros
    [[maybe_unused]] bool marked = false;
#pragma unroll 1
    while (position < end) {
        const int tile_end = position - k + k_units;
        const int segment_end = min(end, tile_end);
        const bool complete = !Clustered && k == 0 && segment_end == tile_end;
        int left = segment_end - position;
#pragma unroll
        for (int i = 0; i < TokenTiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
#pragma unroll 1
        while (left > 0) {
            const int count = min(left, chunk_units);
#if __CUDA_ARCH__ >= 900
            mbarrier_wait(barrier, phase);
#else
            async_copy_wait<cp_async_stages - 1>();
            __syncwarp();
#endif
            // The four lanes of a row need the same scales, so each scale is decoded by one lane and shared.
            const uint2 bytes = load_shared_64(chunk + (lane / 8) * unit_bytes + unit_code_bytes + (lane % 8) * 8);
            store_shared_128(scratch + lane * 16, decode_scales<T>(bytes));
            __syncwarp();
            if (count == chunk_units) {
#pragma unroll
                for (int u = 0; u < chunk_units; ++u)
                    multiply_unit<T, TokenTiles>(acc, chunk + u * unit_bytes, lane_scales + u * 128,
                                                 x_two_tiles + k * 128 + u * 128, x_two_slices + k * 128 + u * 128,
                                                 p.x_pitch, lane);
            } else {
#pragma unroll 1
                for (int u = 0; u < count; ++u)
                    multiply_unit<T, TokenTiles>(acc, chunk + u * unit_bytes, lane_scales + u * 128,
                                                 x_two_tiles + k * 128 + u * 128, x_two_slices + k * 128 + u * 128,
                                                 p.x_pitch, lane);
            }
            __syncwarp();
            ring.request(chunk, barrier, lane);
            chunk += chunk_bytes;
            barrier += 8;
            if (chunk == ring_end) {
                chunk = ring_address;
                barrier = stage_barriers;
                phase ^= 1u;
            }
            k += count;
            left -= count;
        }
        position = segment_end;
        if (complete) {
#pragma unroll
            for (int i = 0; i < TokenTiles; ++i) {
                const unsigned repair = store_fragment<T>(p.out, acc[i], first_tile + tile, i, lane);
                if (repair != 0) {
                    atomicOr(flags + tile, static_cast<unsigned long long>(repair) << (8 * i + lane % 4 * 2));
                    marked = true;
                }
            }
            last_is_stored = true;
        } else if (position < end) {
            if constexpr (Clustered) {
                float4* const slot = reinterpret_cast<float4*>(shared + p.slots_offset + tile * sum_bytes) + lane;
#pragma unroll
                for (int i = 0; i < TokenTiles; ++i)
                    slot[i * 32] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
            } else {
#pragma unroll
                for (int i = 0; i < TokenTiles; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) head[i][j] = acc[i][j];
            }
        } else {
            last_is_stored = false;
        }
        if (position == tile_end) {
            k = 0;
            ++tile;
        }
    }

    // The warp's ring is free now: its last sum (and head) go there. Once every block has got here, x is free too: the
    // cluster's sums go there.
#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) {
        __syncwarp();
        cluster_arrive_relaxed();
    }
#endif
    __syncwarp();
    float4* const mine = reinterpret_cast<float4*>(shared + warp * ring_bytes) + lane;
    if (!last_is_stored)
#pragma unroll
        for (int i = 0; i < TokenTiles; ++i) mine[i * 32] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    if constexpr (!Clustered)
#pragma unroll
        for (int i = 0; i < TokenTiles; ++i)
            mine[sum_bytes / 16 + i * 32] = make_float4(head[i][0], head[i][1], head[i][2], head[i][3]);
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) cluster_wait();
#endif

    // A fragment's sum over this block's K, in the order of the warps.
    const auto add_up = [&](int t, int i, int first, int last, float (&sums)[4]) {
        const std::uint8_t* const from = shared + i * fragment_bytes + lane * 16;
        for (int w = first; w < (last & 0x7F); ++w) add(sums, *reinterpret_cast<const float4*>(from + w * ring_bytes));
        add(sums, *reinterpret_cast<const float4*>(from + (last < 0x80 ? last * ring_bytes
                                                           : Clustered ? p.slots_offset + t * sum_bytes
                                                                       : (last & 0x7F) * ring_bytes + sum_bytes)));
    };
#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) {
        const auto inbox = [&](int t, int from) {
            return p.x_offset + inbox_slot(t, from, ranks, p.parts.cluster_shift) * sum_bytes + lane * 16;
        };
        // A warp sends all fragments of a tile: the addresses are most of the work.
#pragma unroll 1
        for (int t = warp; t < tiles; t += warps) {
            const int owner = t & (ranks - 1);
            if (owner == rank) continue;
            const int first = first_warp[t];
            const int last = last_warp[t];
            const std::uint32_t to = address_in_block(base + inbox(t, rank), owner);
            const std::uint32_t arrived = address_in_block(inbox_barrier, owner);
#pragma unroll
            for (int i = 0; i < TokenTiles; ++i) {
                float sums[4] = {};
                add_up(t, i, first, last, sums);
                store_async_128(to + i * fragment_bytes, sums, arrived);
            }
        }
        bool arrived = false;
#pragma unroll 1
        for (int item = warp; item < owned * TokenTiles; item += warps) {
            const int t = (item / TokenTiles << p.parts.cluster_shift) + rank;
            const int i = item % TokenTiles;
            float own[4] = {};
            add_up(t, i, first_warp[t], last_warp[t], own);
            if (!arrived) mbarrier_wait(inbox_barrier, 0);
            arrived = true;
            float sums[4] = {};
            for (int r = 0; r < ranks; ++r)
                add(sums, r == rank ? make_float4(own[0], own[1], own[2], own[3])
                                    : *reinterpret_cast<const float4*>(shared + inbox(t, r) + i * fragment_bytes));
            const unsigned repair = store_fragment<T>(p.out, sums, first_tile + t, i, lane);
            repair_fragment<T>(p.out, repair, first_tile + t, i);
        }
    }
#endif
    if constexpr (!Clustered) {
#pragma unroll 1
        for (int t = warp; t < tiles; t += warps) {
            const int first = first_warp[t];
            const int last = last_warp[t];
            if (first == (last & 0x7F)) continue;  // one warp's alone: stored in the loop
#pragma unroll 1
            for (int i = 0; i < TokenTiles; ++i) {
                float sums[4] = {};
                add_up(t, i, first, last, sums);
                const unsigned repair = store_fragment<T>(p.out, sums, first_tile + t, i, lane);
                repair_fragment<T>(p.out, repair, first_tile + t, i);
            }
        }
        __syncwarp();
        if (__any_sync(0xFFFFFFFFu, marked))  // by what the warp has stored in the loop
            for (int t = first_of_warp; t < tiles && t * k_units < end; ++t) {
                if (first_warp[t] != warp || (last_warp[t] & 0x7F) != warp) continue;
                repair_marked<T>(p.out, flags[t], first_tile + t);
            }
    }
#endif
}

template <class T, int TokenTiles, bool Clustered>
cudaError_t configure(StreamParameters p, std::int64_t tiles, const GemmMmaTuning& t, const GemmArguments& a) {
    constexpr auto kernel = stream_kernel<T, TokenTiles, Clustered>;
    constexpr int sum_bytes = TokenTiles * fragment_bytes;
    const int ranks = Clustered ? t.cluster : 1;
    if (Clustered && (a.kernel_arch < 90 || ranks < 2)) return cudaErrorInvalidConfiguration;
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    std::int64_t clusters = 0;
    if (const cudaError_t e = count_clusters<kernel, Clustered>(ranks, tiles, a, &clusters)) return e;
    if (!deal_out(p.parts, tiles, clusters, ranks)) return cudaErrorInvalidConfiguration;
    p.parts.stages = a.kernel_arch >= 90 ? t.stages : cp_async_stages;
    p.parts.early_stages = a.kernel_arch >= 90 ? std::min(t.early_stages, p.parts.stages) : 0;

    const int ring = p.parts.stages * chunk_bytes;
    const int units = p.parts.most_units();
    const std::int64_t block_tiles = p.parts.most_tiles();
    if (ring < sum_bytes * (Clustered ? 1 : 2)) return cudaErrorInvalidConfiguration;
    if (block_tiles * units * std::max(warps, units) > INT32_MAX) return cudaErrorInvalidConfiguration;
    p.x_pitch = units * prepacked::unit_k * 2 + 16;
    std::int64_t bytes = warps * ring;
    p.x_offset = static_cast<int>(bytes);
    bytes += std::max<std::int64_t>(TokenTiles * 8 * p.x_pitch,
                                    Clustered ? (block_tiles + ranks - 1) / ranks * (ranks - 1) * sum_bytes : 0);
    p.scales_offset = static_cast<int>(bytes);
    bytes += warps * scale_bytes;
    p.slots_offset = static_cast<int>(bytes);
    if (Clustered) bytes += block_tiles * sum_bytes;
    p.flags_offset = static_cast<int>(bytes);
    if (!Clustered) bytes += block_tiles * 8;
    p.barriers_offset = static_cast<int>(bytes);
    bytes += (warps * p.parts.stages + 1) * 8;
    p.table_offset = static_cast<int>(bytes);
    bytes += block_tiles * 2;
    return launch<kernel, Clustered>(clusters, ranks, bytes, a, p);
}

template <class T, int TokenTiles>
cudaError_t launch_clustered(const StreamParameters& p, std::int64_t tiles, const GemmMmaTuning& t,
                             const GemmArguments& a) {
    if (t.cluster > 8) return cudaErrorInvalidConfiguration;
    return t.cluster > 1 ? configure<T, TokenTiles, true>(p, tiles, t, a)
                         : configure<T, TokenTiles, false>(p, tiles, t, a);
}

template <class T>
cudaError_t launch_type(const StreamParameters& p, std::int64_t tiles, const GemmMmaTuning& t, const GemmArguments& a) {
    switch (t.token_tiles) {
        case 1: return launch_clustered<T, 1>(p, tiles, t, a);
        case 2: return launch_clustered<T, 2>(p, tiles, t, a);
        case 4: return launch_clustered<T, 4>(p, tiles, t, a);
        default: return cudaErrorInvalidConfiguration;
    }
}

}  // namespace

cudaError_t gemm_mma_stream(const GemmArguments& a, const GemmMmaTuning& t) {
    if (a.m > 8 * t.token_tiles) return cudaErrorInvalidConfiguration;
    StreamParameters p{};
    p.out = gemm_output(a);
    p.m = static_cast<int>(a.m);
    p.parts.k_units = static_cast<int>(prepacked::k_units(a.k));
    const std::int64_t tiles = prepacked::row_tiles(a.n);
    return a.dtype == DType::float16 ? launch_type<Float16>(p, tiles, t, a) : launch_type<BFloat16>(p, tiles, t, a);
}

}  // namespace fp4linear::cuda
