// What the streaming kernels of gemm_fused (gemm_mma_stream.cu, gemm_wgmma_stream.cu) share: how the weight is dealt
// out to clusters, blocks and warps, a warp's ring of bulk copies, and the places of sums.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/gemm_mma.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm.h"
#include "cuda/gemm_mma.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device::gemm_stream {

using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_rows;

constexpr int warps = 16;
constexpr int chunk_units = 4;  // of one refill of a ring
constexpr int chunk_bytes = chunk_units * unit_bytes;
constexpr int scale_bytes = chunk_units * 128;  // decoded scales of a chunk
constexpr int fragment_bytes = 512;             // 16 rows x 8 tokens in fp32, as the mma gives them

// Row tiles are dealt out to clusters, K to the blocks of each. A member of the kernels' __grid_constant__ parameters.
struct Parts {
    int k_units;
    int cluster_shift;               // 2^cluster_shift blocks
    int block_units, extra_units;    // K of a block / 64, and how many of a cluster's blocks have one more
    int cluster_tiles, extra_tiles;  // row tiles of a cluster, and how many clusters have one more
    std::uint32_t reciprocals[2];    // of block_units, and of one more, times 2^32 (0: of 1)
    int stages;
    int early_stages;  // requested before x

    [[nodiscard]] int most_units() const { return block_units + (extra_units > 0 ? 1 : 0); }
    [[nodiscard]] std::int64_t most_tiles() const { return cluster_tiles + (extra_tiles > 0 ? 1 : 0); }
};

// False where the blocks of a cluster are no power of two up to 8, or more than there are units.
inline bool deal_out(Parts& p, std::int64_t tiles, std::int64_t clusters, int ranks) {
    p.cluster_shift = ranks == 8 ? 3 : ranks == 4 ? 2 : ranks == 2 ? 1 : 0;
    if (clusters < 1 || ranks != 1 << p.cluster_shift || p.k_units < ranks) return false;
    if (tiles > INT32_MAX / 2) return false;
    p.block_units = p.k_units / ranks;
    p.extra_units = p.k_units % ranks;
    p.cluster_tiles = static_cast<int>(tiles / clusters);
    p.extra_tiles = static_cast<int>(tiles % clusters);
    for (int i = 0; i < 2; ++i) {
        const std::uint64_t divisor = static_cast<std::uint64_t>(p.block_units) + i;
        p.reciprocals[i] = static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + divisor - 1) / divisor);
    }
    return true;
}

// How many clusters of `ranks` blocks to launch: as many as run at once, and no more than there is work for.
template <auto Kernel, bool Clustered>
cudaError_t count_clusters(int ranks, std::int64_t work, const GemmArguments& a, std::int64_t* clusters) {
    int most = a.sm_count / ranks;
    if constexpr (Clustered) {
        int at_once = 0;
        if (const cudaError_t e = most_clusters<Kernel>(ranks, warps * 32, a, &at_once)) return e;
        most = std::min(most, at_once);
    }
    *clusters = std::min<std::int64_t>(most, work);
    return cudaSuccess;
}

template <auto Kernel, bool Clustered, class Parameters>
cudaError_t launch(std::int64_t clusters, int ranks, std::int64_t shared_bytes, const GemmArguments& a,
                   const Parameters& p) {
    if (shared_bytes > a.max_shared_memory) return cudaErrorInvalidConfiguration;
    Launch launch(dim3(static_cast<unsigned>(clusters * ranks)), dim3(warps * 32),
                  static_cast<std::size_t>(shared_bytes), a.stream);
    if (a.programmatic_launch && a.kernel_arch >= 90) launch.overlap_previous();
    if (Clustered) launch.cluster(ranks);
    return launch.run(Kernel, p);
}

// A block's part.
struct Block {
    int first_tile, tiles;
    int first_k_unit, k_units;
    std::uint32_t reciprocal;  // of k_units; the host has made sure that it is exact enough

    __device__ __forceinline__ Block(const Parts& p, int cluster, int rank)
        : first_tile(part_begin(cluster, p.cluster_tiles, p.extra_tiles)),
          tiles(part_begin(cluster + 1, p.cluster_tiles, p.extra_tiles) - first_tile),
          first_k_unit(part_begin(rank, p.block_units, p.extra_units)),
          k_units(part_begin(rank + 1, p.block_units, p.extra_units) - first_k_unit),
          reciprocal(p.reciprocals[k_units > p.block_units ? 1 : 0]) {}

    __device__ __forceinline__ int over_k_units(int position) const {
        return reciprocal == 0 ? position
                               : static_cast<int>(__umulhi(static_cast<std::uint32_t>(position), reciprocal));
    }
};

// A warp's part of the block's list of units, through its ring.
struct WeightRing {
    const std::uint8_t* source;  // of the next chunk
    std::int64_t next_tile;      // bytes from the end of this block's part of a row tile to that of the warp's next
    int k_units;                 // of the block
    int left;                    // units to request
    int until_tile_end;

    __device__ __forceinline__ void request(std::uint32_t destination, std::uint32_t barrier, int lane) {
        if (left > 0) {
            const int count = min(min(chunk_units, until_tile_end), left);
            const int bytes = count * unit_bytes;
#if __CUDA_ARCH__ >= 900
            if (lane == 0) {
                mbarrier_expect_bytes(barrier, bytes);
                bulk_copy_once(destination, source, bytes, barrier);
            }
#else
            for (int i = lane * 16; i < bytes; i += 512) async_copy_16(destination + i, source + i);
#endif
            source += bytes;
            left -= count;
            until_tile_end -= count;
            if (until_tile_end == 0) {
                until_tile_end = k_units;
                source += next_tile;
            }
        }
#if __CUDA_ARCH__ < 900
        async_copy_commit();
#endif
    }
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void init_ring_barriers(std::uint32_t barriers, int stages, int lane) {
    if (lane == 0) {
#pragma unroll 1
        for (int s = 0; s < stages; ++s) mbarrier_init(barriers + s * 8, 1);
        fence_mbarrier_init();
    }
}
#endif

// Starts the copy of a block's K of every token; address(token, piece): where 16 bytes of it go. Rows past M are left
// as they are: they are columns of y of their own.
template <class Address>
__device__ __forceinline__ void copy_x(const RepairSource& source, int tokens, const Block& block, int warp, int lane,
                                       const Address& address) {
    const int ways = tokens * 2 <= warps ? 2 : 1;  // warps a token
    const int pieces = block.k_units * 8;          // of 16 bytes
    const std::uint16_t* const x = source.x + static_cast<std::int64_t>(block.first_k_unit) * prepacked::unit_k;
#pragma unroll 1
    for (int token = warp / ways; token < tokens; token += warps / ways) {
        const std::uint16_t* const row = x + token * source.x_row_stride;
        const auto to = address(token);
#pragma unroll 4
        for (int i = warp % ways * 32 + lane; i < pieces; i += 32 * ways) async_copy_16(to(i), row + i * 8);
    }
    async_copy_commit();
}

// A tile's place among the sums that a cluster's blocks have sent to the tile's owner: one for every block but the
// owner.
__device__ __forceinline__ int inbox_slot(int tile, int from, int ranks, int cluster_shift) {
    const int owner = tile & (ranks - 1);
    return (tile >> cluster_shift) * (ranks - 1) + from - (from > owner ? 1 : 0);
}

// Outputs of a tile that a warp has stored and marked, a bit a token.
template <class T>
__device__ __forceinline__ void repair_marked(const GemmOutput& p, unsigned long long tokens, int tile) {
    while (tokens != 0) {
        const int token = __ffsll(static_cast<long long>(tokens)) - 1;
        tokens &= tokens - 1;
        std::uint16_t* const out = p.y + token * p.source.n + static_cast<std::int64_t>(tile) * unit_rows;
        repair_tile<T>(p.source, tile, token, out, out + 8);
    }
}

}  // namespace fp4linear::cuda::device::gemm_stream
