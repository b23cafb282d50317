// gemm_fused on SM90 for up to 64 tokens, by wgmma: bound by reading and decoding the weight.
//
// A cluster of blocks owns a range of row tiles, each of its blocks one part of K, whose x (every token) it keeps in
// shared memory as wgmma's B operand. Four row tiles are a group, which a warpgroup works on, a tile a warp. A block's
// K steps (64 K of a group), in the order (groups, K), are one list that is dealt out evenly to its four warpgroups:
// each works on a contiguous part, and each of its warps reads its tile's units through its own ring of bulk copies. A
// lane's code word is its part of wgmma's register A operand.
//
// A tile's sum may thus come from several warpgroups and blocks. Each warp's last sum stays in registers until the end,
// those before it go to their tiles' slots (they are complete, or lack only other warps' last sums; without a cluster a
// complete one is stored as y at once). At the end a block adds what belongs together in the order of K, and the tile's
// owner adds the blocks' sums in the order of their ranks.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/gemm_mma.cuh"
#include "cuda/device/gemm_stream.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/gemm.h"
#include "cuda/gemm_mma.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using namespace device::gemm_stream;
using prepacked::unit_k;

constexpr int group_tiles = 4;
constexpr int workers = warps / group_tiles;
constexpr int x_row_bytes = unit_k * 2;

struct StreamParameters {
    GemmOutput out;
    float4* slots;  // in global memory, or null: in shared memory
    int m;
    int token_tiles;                // of 8, that have a token
    std::uint32_t per_token_tiles;  // 1 / token_tiles, times 2^16, rounded up
    Parts parts;
    int x_offset;
    int scales_offset;
    int slots_offset;
    int flags_offset;
    int table_offset;
    int barriers_offset;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// One K step, two slices at a time: one set of fragments is filled while wgmma has the other.
template <class T, int Tokens>
__device__ __forceinline__ void multiply_step(float (&acc)[Tokens / 8][4], std::uint32_t (&a)[2][2][4],
                                              std::uint32_t unit, std::uint32_t scales, std::uint64_t b, int lane) {
    const uint4 codes = load_shared_128(unit + lane * 16);
    const uint4 row_scales = load_shared_128(scales);
    const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        wgmma_wait<1>();
#pragma unroll
        for (int s = 0; s < 2; ++s) decode_slice<T>(words[2 * half + s], row_scales, 2 * half + s, a[half][s]);
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < 2; ++s)
            wgmma<Tokens>(T{}, reinterpret_cast<float (&)[Tokens / 2]>(acc), a[half][s], b + (2 * half + s) * 2);
        wgmma_commit();
    }
}
#endif

template <class T, int Tokens, bool Clustered>
__global__ void __launch_bounds__(warps * 32, 1) wgmma_stream_kernel(const __grid_constant__ StreamParameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) std::uint8_t shared[];
    constexpr int all_token_tiles = Tokens / 8;
    const int token_tiles = p.token_tiles;
    const int sum_bytes = token_tiles * fragment_bytes;  // of a tile
    constexpr int x_unit_bytes = Tokens * x_row_bytes;
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    const int worker = warp / group_tiles;
    const int tile_in_group = warp % group_tiles;
    const std::uint32_t base = shared_address(shared);
    const int ranks = Clustered ? 1 << p.parts.cluster_shift : 1;
    const int rank = static_cast<int>(blockIdx.x) & (ranks - 1);  // as cluster_rank(), but uniform for the compiler
    launch_dependents();
    const Block block(p.parts, static_cast<int>(blockIdx.x) >> (Clustered ? p.parts.cluster_shift : 0), rank);
    const int first_tile = block.first_tile;
    const int tiles = block.tiles;
    const int k_units = block.k_units;
    const int groups = (tiles + group_tiles - 1) / group_tiles;
    const int length = groups * k_units;
    const auto begin_of = [&](int w) { return length * w / workers; };
    const std::uint32_t inbox_barrier = base + p.barriers_offset + warps * p.parts.stages * 8;
    [[maybe_unused]] unsigned long long* const flags = reinterpret_cast<unsigned long long*>(shared + p.flags_offset);
    const int owned = (tiles - rank + ranks - 1) >> (Clustered ? p.parts.cluster_shift : 0);  // tiles: every ranks-th

    const int begin = begin_of(worker);
    const int end = begin_of(worker + 1);
    const int first_group = block.over_k_units(begin);
    int k = begin - first_group * k_units;

    // The warp's part of the weight. In the last group it may have no tile.
    const int ring_bytes = p.parts.stages * chunk_bytes;
    const std::uint32_t ring = base + warp * ring_bytes;
    const std::uint32_t stage_barriers = base + p.barriers_offset + warp * p.parts.stages * 8;
    const std::int64_t tile_bytes = static_cast<std::int64_t>(p.parts.k_units) * unit_bytes;
    WeightRing weight{
        p.out.source.weight +
            (static_cast<std::int64_t>(first_tile) + first_group * group_tiles + tile_in_group) * tile_bytes +
            static_cast<std::int64_t>(block.first_k_unit + k) * unit_bytes,
        group_tiles * tile_bytes - k_units * unit_bytes, k_units,
        min(end, (tiles - tile_in_group + group_tiles - 1) / group_tiles * k_units) - begin, k_units - k};
    init_ring_barriers(stage_barriers, p.parts.stages, lane);
    __syncwarp();
    // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
#pragma unroll 1
    for (int s = 0; s < p.parts.early_stages; ++s) weight.request(ring + s * chunk_bytes, stage_barriers + s * 8, lane);
    wait_for_previous_grid();

    // x as B operands: per 64 K, rows of 128 bytes with the 128-byte swizzle.
    copy_x(p.out.source, p.m, block, warp, lane, [&](int token) {
        const std::uint32_t to = base + p.x_offset + token * x_row_bytes;
        return [=](int i) { return to + i / 8 * x_unit_bytes + ((i ^ token) & 7) * 16; };
    });
#pragma unroll 1
    for (int s = p.parts.early_stages; s < p.parts.stages; ++s)
        weight.request(ring + s * chunk_bytes, stage_barriers + s * 8, lane);
    if constexpr (!Clustered)
        for (int i = threadIdx.x; i < tiles; i += warps * 32) flags[i] = 0;
    if (Clustered && warp == warps - 1 && lane == 0) {
        mbarrier_init(inbox_barrier, 1);
        fence_mbarrier_init();
    }
    // Whose shares a group's sum has: of workers first to last, whose share is a slot's (or head) where `early`.
    struct Shares {
        int first, last;
        bool early;
    };
    const auto shares_of = [&](int g) {
        const int from = g * k_units;
        const int to = from + k_units;
        Shares shares{0, 0, false};
#pragma unroll
        for (int w = 1; w < workers; ++w) {
            shares.first += begin_of(w) <= from ? 1 : 0;
            shares.last += begin_of(w) < to ? 1 : 0;
        }
        shares.early = begin_of(shares.last + 1) > to;
        return shares;
    };
    // While x is on its way: where a tile's shares are at the end, and where their sum goes.
    [[maybe_unused]] const std::uint32_t table = base + p.table_offset;
    if constexpr (Clustered)
#pragma unroll 1
        for (int tile = static_cast<int>(threadIdx.x); tile < tiles; tile += warps * 32) {
            const Shares shares = shares_of(tile / group_tiles);
            const int owner = tile & (ranks - 1);
            const std::uint32_t share = base + tile % group_tiles * ring_bytes;
            // 0 stands for a slot in global memory: nothing of a block's lies at the start of shared memory.
            const std::uint32_t slot = p.slots != nullptr ? 0 : base + p.slots_offset + tile * sum_bytes;
            const auto inbox = [&](int from) {
                return base + p.x_offset + inbox_slot(tile, from, ranks, p.parts.cluster_shift) * sum_bytes;
            };
            store_shared_128(
                table + tile * 16,
                make_uint4(share + shares.first * group_tiles * ring_bytes, shares.last - shares.first,
                           shares.early ? slot : share + shares.last * group_tiles * ring_bytes,
                           owner == rank ? inbox(owner == 0 ? 1 : 0) : address_in_block(inbox(rank), owner)));
        }
    async_copy_wait<0>();
    fence_async_proxy();
    __syncthreads();
    // Here and not where the barrier is made: a warp makes it, and racecheck wants more than its order.
    if (Clustered && warp == warps - 1 && lane == 0)
        mbarrier_expect_bytes(inbox_barrier, (ranks - 1) * owned * sum_bytes);

    const std::uint32_t scratch = base + p.scales_offset + warp * scale_bytes;
    const std::uint32_t lane_scales = scratch + lane / 4 * 16;
    float4* const slots = (p.slots != nullptr ? p.slots + static_cast<std::int64_t>(blockIdx.x) *
                                                              (p.parts.cluster_tiles + 1) * (sum_bytes / 16)
                                              : reinterpret_cast<float4*>(shared + p.slots_offset)) +
                          lane;
    std::uint32_t chunk = ring;
    std::uint32_t barrier = stage_barriers;
    std::uint32_t phase = 0;
    const std::uint32_t ring_end = ring + ring_bytes;
    std::uint32_t a[2][2][4];
    float acc[all_token_tiles][4] = {};
    float head[all_token_tiles][4];  // without a cluster: the first sum, where other warps have a share of it
    int position = begin;
    int group = first_group;
    bool last_is_stored = false;  // a warp without work has a sum of zeros
    [[maybe_unused]] bool marked = false;
#pragma unroll 1
    while (position < end) {
        const int segment_end = min(end, position - k + k_units);
        const bool whole_group = segment_end == position - k + k_units;
        const bool complete = !Clustered && k == 0 && whole_group;
        const int tile = group * group_tiles + tile_in_group;
        const bool valid = tile < tiles;
#pragma unroll
        for (int i = 0; i < all_token_tiles; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[i][j] = 0.0f;
        wgmma_fence();
        int left = segment_end - position;
#pragma unroll 1
        while (left > 0) {
            const int count = min(left, chunk_units);
            if (valid) {
                mbarrier_wait(barrier, phase);
                // The four lanes of a row need the same scales, so each scale is decoded by one lane and shared.
                const uint2 bytes = load_shared_64(chunk + (lane / 8) * unit_bytes + unit_code_bytes + (lane % 8) * 8);
                store_shared_128(scratch + lane * 16, decode_scales<T>(bytes));
                __syncwarp();
            }
            // The shuffle keeps the descriptors in uniform registers.
            const std::uint64_t b = b_descriptor(__shfl_sync(0xFFFFFFFFu, base + p.x_offset + k * x_unit_bytes, 0));
            if (count == chunk_units) {
#pragma unroll
                for (int u = 0; u < chunk_units; ++u)
                    multiply_step<T, Tokens>(acc, a, chunk + u * unit_bytes, lane_scales + u * 128,
                                             b + u * (x_unit_bytes >> 4), lane);
            } else {
#pragma unroll 1
                for (int u = 0; u < count; ++u)
                    multiply_step<T, Tokens>(acc, a, chunk + u * unit_bytes, lane_scales + u * 128,
                                             b + static_cast<std::uint32_t>(u * (x_unit_bytes >> 4)), lane);
            }
            __syncwarp();
            if (valid) {
                weight.request(chunk, barrier, lane);
                chunk += chunk_bytes;
                barrier += 8;
                if (chunk == ring_end) {
                    chunk = ring;
                    barrier = stage_barriers;
                    phase ^= 1u;
                }
            }
            k += count;
            left -= count;
        }
        wgmma_wait<0>();
        position = segment_end;
        if (complete) {
            if (valid)
#pragma unroll
                for (int i = 0; i < all_token_tiles; ++i) {
                    if (i >= token_tiles) break;
                    const unsigned repair = store_fragment<T>(p.out, acc[i], first_tile + tile, i, lane);
                    if (repair != 0) {
                        atomicOr(flags + tile, static_cast<unsigned long long>(repair) << (8 * i + lane % 4 * 2));
                        marked = true;
                    }
                }
            last_is_stored = true;
        } else if (position < end) {
            if constexpr (Clustered) {
                if (valid)
#pragma unroll
                    for (int i = 0; i < all_token_tiles; ++i)
                        if (i < token_tiles)
                            slots[(tile * token_tiles + i) * 32] =
                                make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
            } else {
#pragma unroll
                for (int i = 0; i < all_token_tiles; ++i)
#pragma unroll
                    for (int j = 0; j < 4; ++j) head[i][j] = acc[i][j];
            }
        } else {
            last_is_stored = false;
        }
        if (whole_group) {
            k = 0;
            ++group;
        }
    }

    // The warp's ring is free now: its last sum (and head) go there. Once every block has got here, x is free too: the
    // cluster's sums go there.
    if constexpr (Clustered) {
        __syncwarp();
        cluster_arrive_relaxed();
    }
    __syncwarp();
    float4* const mine = reinterpret_cast<float4*>(shared + warp * ring_bytes) + lane;
    if (!last_is_stored)
#pragma unroll
        for (int i = 0; i < all_token_tiles; ++i)
            if (i < token_tiles) mine[i * 32] = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    if constexpr (!Clustered)
#pragma unroll
        for (int i = 0; i < all_token_tiles; ++i)
            if (i < token_tiles)
                mine[sum_bytes / 16 + i * 32] = make_float4(head[i][0], head[i][1], head[i][2], head[i][3]);
    __syncthreads();
    if constexpr (Clustered) cluster_wait();

    // add_up: a fragment's sum over this block's K, in the order of the workers.
    if constexpr (Clustered) {
        const auto load_sums = [](std::uint32_t address) {
            const uint4 v = load_shared_128(address);
            return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
        };
        const auto add_up = [&](int tile, int i, const uint4& entry, float (&sums)[4]) {
            const std::uint32_t fragment = i * fragment_bytes + lane * 16;
            std::uint32_t from = entry.x + fragment;
#pragma unroll 1
            for (std::uint32_t w = entry.y; w > 0; --w, from += group_tiles * ring_bytes) add(sums, load_sums(from));
            if (entry.z != 0)
                add(sums, load_sums(entry.z + fragment));
            else
                add(sums, slots[(tile * token_tiles + i) * 32]);
        };
        // A warp sends all fragments of a tile: the addresses are most of the work.
#pragma unroll 1
        for (int tile = warp; tile < tiles; tile += warps) {
            const int owner = tile & (ranks - 1);
            if (owner == rank) continue;
            const uint4 entry = load_shared_128(table + tile * 16);
            float sums[all_token_tiles][4] = {};
#pragma unroll
            for (int i = 0; i < all_token_tiles; ++i)
                if (i < token_tiles) add_up(tile, i, entry, sums[i]);
            const std::uint32_t to = entry.w + lane * 16;
            const std::uint32_t arrived = address_in_block(inbox_barrier, owner);
#pragma unroll
            for (int i = 0; i < all_token_tiles; ++i)
                if (i < token_tiles) store_async_128(to + i * fragment_bytes, sums[i], arrived);
        }
        bool arrived = false;
#pragma unroll 1
        for (int item = warp; item < owned * token_tiles; item += warps) {
            const int turn = static_cast<int>(item * p.per_token_tiles >> 16);
            const int tile = (turn << p.parts.cluster_shift) + rank;
            const int i = item - turn * token_tiles;
            const uint4 entry = load_shared_128(table + tile * 16);
            float own[4] = {};
            add_up(tile, i, entry, own);
            if (!arrived) mbarrier_wait(inbox_barrier, 0);
            arrived = true;
            float sums[4] = {};
            std::uint32_t from = entry.w + i * fragment_bytes + lane * 16;
#pragma unroll 1
            for (int r = 0; r < ranks; ++r) {
                if (r == rank) {
                    add(sums, make_float4(own[0], own[1], own[2], own[3]));
                } else {
                    add(sums, load_sums(from));
                    from += sum_bytes;
                }
            }
            const unsigned repair = store_fragment<T>(p.out, sums, first_tile + tile, i, lane);
            repair_fragment<T>(p.out, repair, first_tile + tile, i);
        }
    } else {
        const auto add_up = [&](int tile, int i, const Shares& shares, float (&sums)[4]) {
            const std::uint8_t* from = shared + tile % group_tiles * ring_bytes + i * fragment_bytes + lane * 16;
            for (int w = shares.first; w < shares.last; ++w)
                add(sums, *reinterpret_cast<const float4*>(from + w * group_tiles * ring_bytes));
            from += shares.last * group_tiles * ring_bytes;
            add(sums, *reinterpret_cast<const float4*>(from + (shares.early ? sum_bytes : 0)));
        };
        // Groups with shares of several workers: those where the workers' parts meet.
        int before = -1;
#pragma unroll 1
        for (int w = 1; w < workers; ++w) {
            const int meeting = begin_of(w);
            const int g = block.over_k_units(meeting);
            const Shares shares = shares_of(g);
            if (g == before || g >= groups || shares.first == shares.last) continue;
            before = g;
#pragma unroll 1
            for (int item = warp; item < group_tiles * token_tiles; item += warps) {
                const int tile = g * group_tiles + item % group_tiles;
                const int i = item / group_tiles;
                if (tile >= tiles) continue;
                float sums[4] = {};
                add_up(tile, i, shares, sums);
                const unsigned repair = store_fragment<T>(p.out, sums, first_tile + tile, i, lane);
                repair_fragment<T>(p.out, repair, first_tile + tile, i);
            }
        }
        __syncwarp();
        if (__any_sync(0xFFFFFFFFu, marked))  // by what the warp has stored in the loop
            for (int g = first_group; g < groups && g * k_units < end; ++g) {
                const int tile = g * group_tiles + tile_in_group;
                const Shares shares = shares_of(g);
                if (tile >= tiles || shares.first != worker || shares.last != worker) continue;
                repair_marked<T>(p.out, flags[tile], first_tile + tile);
            }
    }
#endif
}

constexpr std::int64_t max_slot_bytes = std::int64_t{32} << 20;  // in the workspace

template <class T, int Tokens, bool Clustered>
cudaError_t configure(StreamParameters p, const GemmMmaTuning& t, const GemmArguments& a) {
    constexpr auto kernel = wgmma_stream_kernel<T, Tokens, Clustered>;
    p.token_tiles = (p.m + 7) / 8;
    p.per_token_tiles = 65536u / p.token_tiles + 1;  // exact below 8192 fragments
    const int sum_bytes = p.token_tiles * fragment_bytes;
    const int ranks = Clustered ? t.cluster : 1;
    const std::int64_t all_tiles = prepacked::row_tiles(a.n);
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    std::int64_t clusters = 0;
    if (const cudaError_t e =
            count_clusters<kernel, Clustered>(ranks, (all_tiles + group_tiles - 1) / group_tiles, a, &clusters))
        return e;
    if (!deal_out(p.parts, all_tiles, clusters, ranks)) return cudaErrorInvalidConfiguration;
    const int units = p.parts.most_units();
    const std::int64_t block_tiles = p.parts.most_tiles();
    const std::int64_t groups = (block_tiles + group_tiles - 1) / group_tiles;
    if (block_tiles * p.token_tiles > 8192) return cudaErrorInvalidConfiguration;
    if (groups * units * std::max(workers, units) > INT32_MAX) return cudaErrorInvalidConfiguration;
    // The last group has no sum before its last: no slots.
    const std::int64_t slot_bytes_here = Clustered ? (groups - 1) * group_tiles * sum_bytes : 0;
    p.parts.stages = t.stages;
    p.parts.early_stages = std::min(t.early_stages, p.parts.stages);
    if (p.parts.stages * chunk_bytes < sum_bytes * (Clustered ? 1 : 2)) return cudaErrorInvalidConfiguration;
    std::int64_t bytes = warps * p.parts.stages * chunk_bytes;
    bytes = (bytes + 1023) / 1024 * 1024;
    p.x_offset = static_cast<int>(bytes);
    bytes += std::max<std::int64_t>(std::int64_t{units} * Tokens * x_row_bytes,
                                    Clustered ? (block_tiles + ranks - 1) / ranks * (ranks - 1) * sum_bytes : 0);
    p.scales_offset = static_cast<int>(bytes);
    bytes += warps * scale_bytes;
    p.flags_offset = static_cast<int>(bytes);
    if (!Clustered) bytes += block_tiles * 8;
    p.table_offset = static_cast<int>(bytes);
    if (Clustered) bytes += block_tiles * 16;
    p.barriers_offset = static_cast<int>(bytes);
    bytes += (warps * p.parts.stages + 1) * 8;
    p.slots_offset = static_cast<int>((bytes + 15) / 16 * 16);
    if (Clustered) {
        if (p.slots_offset + slot_bytes_here <= a.max_shared_memory) {
            bytes = p.slots_offset + slot_bytes_here;
        } else {
            p.slots = static_cast<float4*>(a.workspace);
            const std::int64_t slot_bytes = clusters * ranks * (p.parts.cluster_tiles + 1) * sum_bytes;
            if (p.slots == nullptr || slot_bytes > static_cast<std::int64_t>(gemm_wgmma_stream_workspace(a)))
                return cudaErrorInvalidConfiguration;
        }
    }
    return launch<kernel, Clustered>(clusters, ranks, bytes, a, p);
}

template <class T, int Tokens>
cudaError_t launch_clustered(const StreamParameters& p, const GemmMmaTuning& t, const GemmArguments& a) {
    if (t.cluster > 8) return cudaErrorInvalidConfiguration;
    return t.cluster > 1 ? configure<T, Tokens, true>(p, t, a) : configure<T, Tokens, false>(p, t, a);
}

template <class T>
cudaError_t launch_type(const StreamParameters& p, const GemmMmaTuning& t, const GemmArguments& a) {
    switch (t.token_tiles) {
        case 2: return launch_clustered<T, 16>(p, t, a);
        case 3: return launch_clustered<T, 24>(p, t, a);
        case 4: return launch_clustered<T, 32>(p, t, a);
        case 6: return launch_clustered<T, 48>(p, t, a);
        case 8: return launch_clustered<T, 64>(p, t, a);
        default: return cudaErrorInvalidConfiguration;
    }
}

}  // namespace

std::size_t gemm_wgmma_stream_workspace(const GemmArguments& a) {
    if (!a.wgmma || a.m > 64 || a.batch_invariant) return 0;
    const std::int64_t sum_bytes = (a.m + 7) / 8 * fragment_bytes;
    const std::int64_t tokens = a.m <= 32 ? (a.m + 7) / 8 * 8 : a.m <= 48 ? 48 : 64;
    const std::int64_t tiles = prepacked::row_tiles(a.n);
    std::int64_t most = 0;
    for (const int ranks : {2, 4, 8}) {
        const std::int64_t clusters = std::max(1, a.sm_count / ranks * 3 / 4);  // at least so many run at once
        const std::int64_t x_bytes = (prepacked::k_units(a.k) + ranks - 1) / ranks * tokens * x_row_bytes;
        const std::int64_t slots = (tiles + clusters - 1) / clusters * sum_bytes;
        if (warps * (2 * chunk_bytes + scale_bytes) + std::max(x_bytes, slots) + slots + 4096 <= a.max_shared_memory)
            continue;
        const std::int64_t bytes = ranks * (tiles + a.sm_count) * sum_bytes;
        if (bytes <= max_slot_bytes) most = std::max(most, bytes);
    }
    return static_cast<std::size_t>(most);
}

cudaError_t gemm_wgmma_stream(const GemmArguments& a, const GemmMmaTuning& t) {
    if (a.m > 8 * t.token_tiles || !a.wgmma) return cudaErrorInvalidConfiguration;
    StreamParameters p{};
    p.out = gemm_output(a);
    p.m = static_cast<int>(a.m);
    p.parts.k_units = static_cast<int>(prepacked::k_units(a.k));
    return a.dtype == DType::float16 ? launch_type<Float16>(p, t, a) : launch_type<BFloat16>(p, t, a);
}

}  // namespace fp4linear::cuda
