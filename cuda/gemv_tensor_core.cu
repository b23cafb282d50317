// gemv_tensor_core: a few rows of x against a prepacked NVFP4 weight, bound by reading the weight.
//
// mma.m16n8k16 with the weight in A (16 outputs) and the tokens in B. A block holds `groups` groups of `splits` warps.
// A group works on one tile of 16 outputs at a time, each of its warps on its own K range (`Units` x 64), whose x stays
// in registers for the whole launch. Each warp streams its part of the weight through its own ring in shared memory:
// lane 0 requests chunk after chunk, no other warp is waited for. Partial sums meet in shared memory, where a warp that
// rotates from tile to tile adds them in a fixed order, one tile late, and stores y.
//
// A K whose x does not fit in the registers of a block is shared by a cluster of blocks, which take turns in adding up
// a tile: the others' sums arrive in the owner's shared memory. Small layers have a kernel of their own
// (gemv_small.cu).
//
// M = 1: the x of slice s goes to column s % 8 of B alone. Eight mma then give 16 x 8 sums a block of 16 K, and
// the scales multiply those 4 floats a lane instead of the 4 x 8 registers of A.
//
// Range (bf16; fp16 needs nothing): sums are kept * 2^10, so that the smallest product, 2^-133 * 2^-10, keeps 2^-16
// of relative accuracy in fp32. A sum that leaves the fp32 range while x is finite is computed again in fp64. With M =
// 1 the A operand is code * 2^-126: x is multiplied by a power of two for its K range, which brings the largest |x| to
// 2^120; a range that is wider than 2^125 takes a loop that lifts the codes by 2^127 instead.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>

#include "cuda/device/eight_tokens.cuh"
#include "cuda/device/fp4.cuh"
#include "cuda/device/gemv.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/single_token.cuh"
#include "cuda/gemv_parameters.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_k;

// racecheck sees a barrier's order only for threads that arrive themselves, not through __syncwarp: its build lets
// every lane arrive.
#ifdef FP4LINEAR_RACECHECK
constexpr int arrivals_a_warp = 32;
#else
constexpr int arrivals_a_warp = 1;
#endif
constexpr int buffers = 2;          // tiles whose partial sums are in flight in a group
constexpr int cp_async_stages = 2;  // before SM90: cp.async.wait_group takes a constant

// Chunks of a warp's part of the weight, in order, through a ring in shared memory.
template <int ChunkUnits>
struct WeightStream {
    static constexpr int chunk_bytes = ChunkUnits * unit_bytes;
    const std::uint8_t* next;  // source of the next chunk to request
    std::int64_t tile_stride;  // bytes from a tile's part to the next tile's
    std::uint32_t ring;
    std::uint32_t barriers;  // one a stage
    int stages;
    int tile;  // to request
    int tile_step;
    int tiles;
    int range_bytes;    // of the weight in a tile
    int requested = 0;  // bytes of the current tile
    int request_stage = 0;
    int stage = 0;
    std::uint32_t phase = 0;

    __device__ __forceinline__ void copy(const std::uint8_t* source, int bytes, int lane) {
        const std::uint32_t destination = ring + request_stage * chunk_bytes;
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            mbarrier_expect_bytes(barriers + request_stage * 8, bytes);
            bulk_copy(destination, source, bytes, barriers + request_stage * 8);
        }
#else
        for (int i = lane * 16; i < bytes; i += 512) async_copy_16(destination + i, source + i);
#endif
        request_stage = request_stage + 1 == stages ? 0 : request_stage + 1;
    }
    __device__ __forceinline__ void request(int lane) {
        if (tile < tiles) {
            const int bytes = min(chunk_bytes, range_bytes - requested);
            copy(next + requested, bytes, lane);
            requested += chunk_bytes;
            if (requested >= range_bytes) {
                requested = 0;
                next += tile_stride;
                tile += tile_step;
            }
        }
#if __CUDA_ARCH__ < 900
        async_copy_commit();
#endif
    }
    __device__ __forceinline__ std::uint32_t wait() const {
#if __CUDA_ARCH__ >= 900
        mbarrier_wait(barriers + stage * 8, phase);
#else
        async_copy_wait<cp_async_stages - 1>();
        __syncwarp();
#endif
        return ring + stage * chunk_bytes;
    }
    // The chunk has been read: its place takes the next one.
    __device__ __forceinline__ void release(int lane) {
        __syncwarp();
        request(lane);
        if (++stage == stages) {
            stage = 0;
            phase ^= 1u;
        }
    }
};

template <bool Single>
struct TileSums {
    static constexpr int values = Single ? 2 : 4;  // of a lane: rows g, g + 8; tokens 2t, 2t + 1
    float v[values] = {};

    __device__ __forceinline__ void add(const float (&other)[values]) {
#pragma unroll
        for (int i = 0; i < values; ++i) v[i] += other[i];
    }
};

// One warp adds the partial sums of a tile in the order of the splits.
template <bool Single>
__device__ __forceinline__ TileSums<Single> add_partials(const float* partials, int splits, int lane) {
    TileSums<Single> sums;
    for (int s = 0; s < splits; ++s) {
        if constexpr (Single) {
            const float2 v = *reinterpret_cast<const float2*>(partials + (s * 32 + lane) * 2);
            sums.add({v.x, v.y});
        } else {
            const float4 v = *reinterpret_cast<const float4*>(partials + (s * 32 + lane) * 4);
            sums.add({v.x, v.y, v.z, v.w});
        }
    }
    return sums;
}

// Stores y of a tile. True where a sum is not finite.
template <class T, bool Single>
__device__ __forceinline__ bool store_tile(const GemvParameters& p, TileSums<Single>& sums, int tile, int lane) {
    bool left_range = false;
    const std::int64_t slot = static_cast<std::int64_t>(tile) * TileSums<Single>::values * 32 + lane;
    if (p.sums_in != nullptr)
#pragma unroll
        for (int i = 0; i < TileSums<Single>::values; ++i) sums.v[i] = p.sums_in[slot + i * 32] + sums.v[i];
    if (p.sums_out != nullptr) {
#pragma unroll
        for (int i = 0; i < TileSums<Single>::values; ++i) p.sums_out[slot + i * 32] = sums.v[i];
        return false;
    }
    if constexpr (Single) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2)
#pragma unroll
            for (int i = 0; i < 2; ++i) sums.v[i] += __shfl_xor_sync(0xFFFFFFFFu, sums.v[i], offset);
    }
#pragma unroll
    for (int i = 0; i < TileSums<Single>::values; ++i) {
        const int row_in_tile = lane / 4 + 8 * (Single ? i : i / 2);
        const std::int64_t row = static_cast<std::int64_t>(tile) * prepacked::unit_rows + row_in_tile;
        const int token = Single ? 0 : 2 * (lane % 4) + i % 2;
        const bool valid = row < p.n && token < p.m && (!Single || lane % 4 == 0);
        if (valid) {
            p.y[token * p.n + row] = epilogue<T>(scale2_of(p, row), bias_of(p, row), sums.v[i]);
            left_range = left_range || !is_finite(sums.v[i]);
        }
    }
    return left_range;
}

template <class T, bool Single, int Units, int ChunkUnits, int Threads, int BlocksPerSm, bool Clustered>
__global__ void __launch_bounds__(Threads, BlocksPerSm) gemv_kernel(const __grid_constant__ GemvParameters p) {
#if __CUDA_ARCH__ >= 800  // mma.m16n8k16 and cp.async; SM75 builds hold an empty kernel that nothing launches
    extern __shared__ __align__(128) std::uint8_t shared[];
    constexpr int chunk_bytes = ChunkUnits * unit_bytes;
    constexpr int chunks = Units / ChunkUnits;
    constexpr bool keep_masked = BlocksPerSm == 1 && Units <= 8;  // 8 registers a unit
    constexpr int partial_floats = Single ? 64 : 128;             // of a warp
    // A block is 32 x splits x groups threads; the shuffles tell the compiler that a warp agrees on these.
    const int lane = threadIdx.x;
    const int cluster = Clustered ? p.cluster : 1;
    const int split = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.y), 0);
    const int group = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.z), 0);
    const int warps = p.splits * p.groups;
    const int warp = group * p.splits + split;

    // Shared memory: rings, partial sums, x staging, barriers.
    const std::uint32_t base = shared_address(shared);
    const std::uint32_t partials_offset = warps * p.stages * chunk_bytes;
    const std::uint32_t scratch_offset = partials_offset + p.groups * buffers * p.splits * partial_floats * 4;
    const std::uint32_t parts_offset =
        scratch_offset + (Single ? 0 : warps * EightTokens<Units, ChunkUnits>::scratch_bytes);
    const int slots = Clustered ? p.slots : 0;
    const std::uint32_t barriers_offset = parts_offset + slots * cluster * partial_floats * 4;
    const std::uint32_t scratch = base + scratch_offset + warp * EightTokens<Units, ChunkUnits>::scratch_bytes;
    const std::uint32_t stage_barriers = base + barriers_offset + warp * p.stages * 8;
    const std::uint32_t full = base + barriers_offset + (warps * p.stages + group * 2 * buffers) * 8;
    const std::uint32_t empty = full + buffers * 8;
    [[maybe_unused]] const std::uint32_t parts_arrived =
        base + barriers_offset + (warps * p.stages + p.groups * 2 * buffers) * 8;

    launch_dependents();
    const int rank = static_cast<int>(blockIdx.x) % cluster;
    const int part = rank * p.splits + split;
    // A cluster deals K out evenly, which costs registers and gains nothing for one block.
    constexpr int step = Single ? 2 : 1;
    const int first_unit = Clustered ? part * p.units_a_warp + min(part, p.extra_steps) * step : part * Units;
    const int units =  // none for some warps of a cluster
        Clustered ? max(0, min(p.units_a_warp + (part < p.extra_steps ? step : 0), p.k_units - first_unit))
                  : min(Units, p.k_units - first_unit);
    const int row_blocks = static_cast<int>(gridDim.x) / cluster;
    const int first_tile = group * row_blocks + static_cast<int>(blockIdx.x) / cluster;
    const int tile_step = p.groups * row_blocks;
    const std::int64_t tile_bytes = (p.k / unit_k) * unit_bytes;
    const std::int64_t first_byte =
        first_tile * tile_bytes + static_cast<std::int64_t>(p.first_k_unit + first_unit) * unit_bytes;
    WeightStream<ChunkUnits> stream{p.weight + first_byte,
                                    tile_bytes * tile_step,
                                    base + warp * p.stages * chunk_bytes,
                                    stage_barriers,
                                    p.stages,
                                    first_tile,
                                    tile_step,
                                    !Clustered || units > 0 ? p.tiles : 0,
                                    units * unit_bytes};
    if (lane == 0) {
#pragma unroll 1
        for (int s = 0; s < p.stages; ++s) mbarrier_init(stage_barriers + s * 8, 1);
#if __CUDA_ARCH__ >= 900
        fence_mbarrier_init();
#endif
    }
    __syncwarp();
    // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
#pragma unroll 1
    for (int s = 0; s < p.early_stages; ++s) stream.request(lane);
    if (split == 0 && lane == 0) {
        for (int i = 0; i < buffers; ++i) {
            mbarrier_init(full + i * 8, p.splits * arrivals_a_warp);
            mbarrier_init(empty + i * 8, arrivals_a_warp);
        }
#if __CUDA_ARCH__ >= 900
        if (Clustered) {
            for (int i = 0; i < slots; ++i) mbarrier_init(parts_arrived + i * 8, 1);
            fence_mbarrier_init();
            for (int i = 0; i < slots; ++i)
                mbarrier_expect_bytes(parts_arrived + i * 8, (cluster - 1) * partial_floats * 4);
        }
#endif
    }
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) cluster_arrive_relaxed();
#endif
    wait_for_previous_grid();

    // x is requested before the rest of the ring: behind it, memory and compute times would add.
    const std::int64_t k_begin = static_cast<std::int64_t>(p.first_k_unit + first_unit) * unit_k;
    const std::int64_t k_end = k_begin + static_cast<std::int64_t>(units) * unit_k;
    const auto fill_ring = [&] {
#pragma unroll 1
        for (int s = p.early_stages; s < p.stages; ++s) stream.request(lane);
    };
    SingleToken<Units> single;
    EightTokens<Units, ChunkUnits> eight;
    if constexpr (Single) {
        single.load(p, k_begin, k_end, lane);
        fill_ring();
        single.normalise(T{});
    } else {
        eight.template load<T>(p, k_begin, k_end, scratch, lane, fill_ring);
    }

#if __CUDA_ARCH__ >= 900
    if constexpr (Clustered) cluster_wait();  // the first block's barrier is ready
#endif

    float* const partials =
        reinterpret_cast<float*>(shared + partials_offset) + group * buffers * p.splits * partial_floats;
    const int used_chunks = (units + ChunkUnits - 1) / ChunkUnits;
    bool left_range = false;

    // A cluster's blocks take turns as the owner of a tile, which adds the others' sums to its own. Each of its tiles
    // has a slot of its own with a place for every block: nothing is used twice.
    [[maybe_unused]] constexpr int values = TileSums<Single>::values;
    [[maybe_unused]] float* const slot_sums = reinterpret_cast<float*>(shared + parts_offset) + lane;

    // Sums of the group's i-th tile: by the warp whose turn it is.
    const auto collect = [&](int i) {
        const int buffer = i % buffers;
        mbarrier_wait(full + buffer * 8, (i / buffers) & 1);
        TileSums<Single> sums = add_partials<Single>(partials + buffer * p.splits * partial_floats, p.splits, lane);
        __syncwarp();
        if (lane < arrivals_a_warp) mbarrier_arrive(empty + buffer * 8);
        if constexpr (Clustered) {
#if __CUDA_ARCH__ >= 900
            const int owner = i % cluster;
            const int slot = i / cluster;
            float* const mine = slot_sums + (slot * cluster + rank) * values * 32;
            if (rank == owner) {
#pragma unroll
                for (int v = 0; v < values; ++v) mine[v * 32] = sums.v[v];
            } else {
                const std::uint32_t to = address_in_block(shared_address(mine), owner);
                const std::uint32_t arrived = address_in_block(parts_arrived + slot * 8, owner);
#pragma unroll
                for (int v = 0; v < values; ++v) store_async(to + v * 128, sums.v[v], arrived);
            }
#endif
        } else {
            left_range |= store_tile<T, Single>(p, sums, first_tile + i * tile_step, lane);
        }
    };
    // The end of a tile of a cluster, later: the blocks need not keep step.
    [[maybe_unused]] const auto complete = [&](int i) {
#if __CUDA_ARCH__ >= 900
        if (i % cluster != rank) return;
        const int slot = i / cluster;
        mbarrier_wait(parts_arrived + slot * 8, 0);
        const float* parts = slot_sums + slot * cluster * values * 32;
        TileSums<Single> sums;
        for (int r = 0; r < cluster; ++r, parts += values * 32)
#pragma unroll
            for (int v = 0; v < values; ++v) sums.v[v] += parts[v * 32];
        left_range |= store_tile<T, Single>(p, sums, first_tile + i * tile_step, lane);
#endif
    };

    int turn = 0;  // i % splits
    int previous_turn = -1;
    int older_turn = -1;
    int i = 0;
    for (int tile = first_tile; tile < p.tiles; tile += tile_step, ++i) {
        const int buffer = i % buffers;
        float acc[2] = {};        // M = 1
        float chains[2][4] = {};  // M > 1
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
            if (c < used_chunks) {
                const std::uint32_t chunk = stream.wait();
                if constexpr (Single) {
                    if (sum_exponent<T> > 0 && single.lift)
                        single.template multiply_chunk<T, true, ChunkUnits, false, Clustered>(acc, c * ChunkUnits,
                                                                                              units, chunk, lane);
                    else
                        single.template multiply_chunk<T, false, ChunkUnits, keep_masked, Clustered>(
                            acc, c * ChunkUnits, units, chunk, lane);
                } else {
                    eight.template multiply_chunk<T, Clustered>(chains, c * ChunkUnits, units, chunk, scratch, lane);
                }
                stream.release(lane);
            }
        }
        if (i >= buffers) mbarrier_wait(empty + buffer * 8, (i / buffers - 1) & 1);
        float* const mine = partials + (buffer * p.splits + split) * partial_floats;
        if constexpr (Single) {
            const int first = single.output_exponent / 2;
            const float factor0 = sum_exponent<T> > 0 ? power_of_two(first) : 1.0f;
            const float factor1 = sum_exponent<T> > 0 ? power_of_two(single.output_exponent - first) : 1.0f;
            *reinterpret_cast<float2*>(mine + lane * 2) =
                make_float2(acc[0] * factor0 * factor1, acc[1] * factor0 * factor1);
        } else {
            *reinterpret_cast<float4*>(mine + lane * 4) =
                make_float4(chains[0][0] + chains[1][0], chains[0][1] + chains[1][1], chains[0][2] + chains[1][2],
                            chains[0][3] + chains[1][3]);
        }
        __syncwarp();
        if (lane < arrivals_a_warp) mbarrier_arrive(full + buffer * 8);
        if (Clustered && split == older_turn) complete(i - 2);
        if (split == previous_turn) collect(i - 1);
        older_turn = previous_turn;
        previous_turn = turn;
        turn = turn + 1 == p.splits ? 0 : turn + 1;
    }
    if (Clustered && split == older_turn) complete(i - 2);
    if (split == previous_turn) {
        collect(i - 1);
        if (Clustered) complete(i - 1);
    }
    if constexpr (sum_exponent<T> > 0) {
        // A warp repairs the tiles that it has stored.
        __syncwarp();
        if (__any_sync(0xFFFFFFFFu, left_range))
            for (int tile = first_tile + split * tile_step, own = split; tile < p.tiles;
                 tile += p.splits * tile_step, own += p.splits)
                if (!Clustered || own % cluster == rank) repair_tokens<T>(p, tile, 0, p.m);
    }
#endif
}

// How a launch is cut. units: K of a warp / 64. chunk_units: of one copy. blocks_per_sm: 2 halves the registers, so
// that the next layer's blocks can start, and request their weights, while this one's finish.
struct Configuration {
    int units;
    int chunk_units;
    int blocks_per_sm;
    int groups;        // tiles in flight in a block
    int stages;        // copies in flight in a warp
    int early_stages;  // of them, requested before x
    int cluster;       // blocks that share a tile; above 1 every block has one tile
};

constexpr int max_warps = 16;
constexpr int max_units_many = 8;           // a warp: 64 registers a lane hold the x of 8 tokens
constexpr int max_units_deep = 9;           // a warp of a cluster: 72 registers
constexpr int max_units_single = 20;        // a warp: M = 1
constexpr int deep_cluster = 2;             // blocks, which all pair up: an SM of Hopper never lacks its neighbour
constexpr int max_deep_tiles_a_block = 64;  // each takes 520 bytes of shared memory

// Measured on one H200 (docs/performance.md). More than two tiles an SM: long K ranges and few blocks; below: short
// ranges, which spread over more warps, and room for the next layer's blocks.
Configuration configure_single(int k_units, int tiles, int sm_count) {
    if (tiles <= 2 * sm_count) {
        if (k_units <= max_warps * 4) return {4, 4, 2, 1, 2, 2, 1};
        if (k_units <= max_warps * 8) return {8, 4, 2, 1, 2, 1, 1};
    }
    const int splits = (k_units + 7) / 8;
    if (splits <= 8) return {8, 4, 1, max_warps / splits, 2, 1, 1};
    if (splits <= max_warps) return {8, 8, 1, 1, splits > 12 ? 3 : 2, splits > 12 ? 2 : 1, 1};
    return {20, 4, 1, 1, 3, 2, 1};
}
Configuration configure_many(int k_units, int tiles, int sm_count, bool small_shared) {
    const int splits = (k_units + 7) / 8;
    if (small_shared) return {8, 4, 1, std::max(1, max_warps / 2 / splits), 2, 1, 1};
    if (splits <= 4 || tiles <= 2 * sm_count) return {8, 4, 1, tiles <= 2 * sm_count ? 1 : max_warps / splits, 3, 1, 1};
    if (k_units <= max_warps * 4) return {4, 4, 1, 1, 2, 1, 1};
    if (k_units <= max_warps * 5) return {5, 5, 1, 1, 2, 1, 1};
    return {8, 4, 1, 1, 3, 1, 1};
}

// K beyond what one block holds: a cluster of blocks, each with its part of K.
Configuration configure_deep(int k_units, bool single) {
    const int units = (k_units + max_warps * deep_cluster - 1) / (max_warps * deep_cluster);
    if (single) {
        if (units <= 8) return {8, 8, 1, 1, 2, 1, deep_cluster};
        if (units <= 10) return {10, 10, 1, 1, 2, 1, deep_cluster};
        return {20, 4, 1, 1, 3, 2, deep_cluster};
    }
    if (units <= 5) return {5, 5, 1, 1, 2, 1, deep_cluster};
    if (units <= 7) return {7, 7, 1, 1, 2, 1, deep_cluster};
    if (units <= 8) return {8, 4, 1, 1, 3, 1, deep_cluster};
    return {9, 3, 1, 1, 3, 1, deep_cluster};
}

template <class T, bool Single, int Units, int ChunkUnits, int BlocksPerSm, bool Clustered = false>
cudaError_t launch(const GemvParameters& base, Configuration c, const GemvArguments& a) {
    constexpr auto* kernel = gemv_kernel<T, Single, Units, ChunkUnits, max_warps * 32, BlocksPerSm, Clustered>;
    GemvParameters p = base;
    p.cluster = c.cluster;
    p.splits = (p.k_units + Units * p.cluster - 1) / (Units * p.cluster);
    if (p.splits > max_warps) return cudaErrorInvalidConfiguration;
    p.groups = Clustered ? 1 : std::clamp(c.groups, 1, max_warps / p.splits);
    // M = 1 works on pairs of units.
    const int steps = Single ? (p.k_units + 1) / 2 : p.k_units;
    p.units_a_warp = steps / (p.splits * p.cluster) * (Single ? 2 : 1);
    p.extra_steps = steps % (p.splits * p.cluster);
    const int row_blocks = std::min(a.sm_count / p.cluster, (p.tiles + p.groups - 1) / p.groups);
    if (row_blocks == 0) return cudaErrorInvalidConfiguration;
    p.slots = Clustered ? ((p.tiles + row_blocks - 1) / row_blocks + p.cluster - 1) / p.cluster : 0;
    p.stages = a.kernel_arch < 90 ? cp_async_stages : c.stages;
    p.early_stages = std::min(c.early_stages, p.stages);
    const int warps = p.splits * p.groups;
    const std::size_t shared =
        static_cast<std::size_t>(warps) * p.stages * (ChunkUnits * unit_bytes + 8) +
        static_cast<std::size_t>(p.groups) * buffers * (p.splits * (Single ? 256 : 512) + 16) +
        (Single ? 0 : static_cast<std::size_t>(warps) * EightTokens<Units, ChunkUnits>::scratch_bytes) +
        static_cast<std::size_t>(p.slots) * (p.cluster * (Single ? 256 : 512) + 8);
    if (shared > static_cast<std::size_t>(a.max_shared_memory)) return cudaErrorInvalidConfiguration;
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    Launch launch(dim3(static_cast<unsigned>(row_blocks * p.cluster)),
                  dim3(32, static_cast<unsigned>(p.splits), static_cast<unsigned>(p.groups)), shared, a.stream);
    if (a.programmatic_launch && a.kernel_arch >= 90) launch.overlap_previous();
    if constexpr (Clustered) launch.cluster(p.cluster);
    return launch.run(kernel, p);
}

template <class T>
cudaError_t launch_configured(const GemvParameters& p, const Configuration& c, const GemvArguments& a) {
    const auto is = [&](int units, int chunk_units, int blocks_per_sm) {
        return c.units == units && c.chunk_units == chunk_units && c.blocks_per_sm == blocks_per_sm;
    };
    if (c.cluster > 1 && p.m == 1) {
        if (is(8, 8, 1)) return launch<T, true, 8, 8, 1, true>(p, c, a);
        if (is(10, 10, 1)) return launch<T, true, 10, 10, 1, true>(p, c, a);
        if (is(20, 4, 1)) return launch<T, true, 20, 4, 1, true>(p, c, a);
    } else if (c.cluster > 1) {
        if (is(5, 5, 1)) return launch<T, false, 5, 5, 1, true>(p, c, a);
        if (is(7, 7, 1)) return launch<T, false, 7, 7, 1, true>(p, c, a);
        if (is(8, 4, 1)) return launch<T, false, 8, 4, 1, true>(p, c, a);
        if (is(9, 3, 1)) return launch<T, false, 9, 3, 1, true>(p, c, a);
    } else if (p.m == 1) {
        if (is(4, 4, 2)) return launch<T, true, 4, 4, 2>(p, c, a);
        if (is(8, 4, 2)) return launch<T, true, 8, 4, 2>(p, c, a);
        if (is(8, 4, 1)) return launch<T, true, 8, 4, 1>(p, c, a);
        if (is(8, 8, 1)) return launch<T, true, 8, 8, 1>(p, c, a);
        if (is(20, 4, 1)) return launch<T, true, 20, 4, 1>(p, c, a);
    } else {
        if (is(4, 4, 1)) return launch<T, false, 4, 4, 1>(p, c, a);
        if (is(5, 5, 1)) return launch<T, false, 5, 5, 1>(p, c, a);
        if (is(8, 4, 1)) return launch<T, false, 8, 4, 1>(p, c, a);
    }
    return cudaErrorInvalidConfiguration;
}

constexpr bool is_small(int max_shared_memory) { return max_shared_memory < 120 * 1024; }

// K that one launch covers, in units: what 16 warps hold, or those of a cluster. 99 KiB of shared memory (SM86, SM89)
// take 8 warps' rings for M > 1.
int max_units_a_launch(std::int64_t m, int max_shared_memory, bool deep) {
    if (deep) return max_warps * deep_cluster * (m == 1 ? max_units_single : max_units_deep);
    if (m == 1) return max_warps * max_units_single;
    return (is_small(max_shared_memory) ? max_warps / 2 : max_warps) * max_units_many;
}

}  // namespace

std::size_t gemv_tensor_core_workspace(std::int64_t n, std::int64_t k, int max_shared_memory) {
    if (prepacked::k_units(k) <= max_units_a_launch(2, max_shared_memory, false)) return 0;
    return static_cast<std::size_t>(prepacked::row_tiles(n)) * prepacked::unit_rows * gemv_tensor_core_max_m *
           sizeof(float);
}

cudaError_t gemv_tensor_core_kernel_arch(int* arch) {
    cudaFuncAttributes attributes{};
    const cudaError_t e =
        cudaFuncGetAttributes(&attributes, gemv_kernel<Float16, true, 4, 4, max_warps * 32, 2, false>);
    if (e == cudaSuccess) *arch = attributes.ptxVersion;
    return e;
}

bool gemv_tensor_core_supports(std::int64_t m, std::int64_t k, int block_size, int sm_version) {
    return sm_version >= 80 && m >= 1 && m <= gemv_tensor_core_max_m && prepacked::supports(k, block_size);
}

cudaError_t gemv_tensor_core(const GemvArguments& a, const GemvTensorCoreTuning& tuning) {
    GemvParameters p = gemv_parameters(a);
    const bool clusters = a.kernel_arch >= 90;
    SmallConfiguration small{tuning.units, tuning.groups, tuning.stages};
    if (tuning.units == 0 ? configure_small(p, a.sm_count, small) : tuning.chunk_units == 0)
        return gemv_small(p, small, a);
    // Several launches where K is long: balanced, and the sums between them stay in fp32.
    const int all_units = p.k_units;
    const int pairs = a.sm_count / deep_cluster;
    const bool can_be_deep = clusters && !is_small(a.max_shared_memory) && pairs > 0 &&
                             p.tiles <= max_deep_tiles_a_block * a.sm_count && all_units > max_warps * max_units_many;
    // One token's x would fit in one block: a cluster is for what it saves in the last, incomplete wave of tiles.
    const bool fewer_waves =
        can_be_deep && (p.tiles + pairs - 1) / pairs < deep_cluster * ((p.tiles + a.sm_count - 1) / a.sm_count);
    const bool deep = can_be_deep && (p.m > 1 || fewer_waves || all_units > max_warps * max_units_single);
    int units_limit = max_units_a_launch(a.m, a.max_shared_memory, deep && tuning.units == 0);
    if (tuning.units != 0 && tuning.cluster > 1) units_limit = all_units;
    const int passes = (all_units + units_limit - 1) / units_limit;
    if (passes > 1 && a.workspace == nullptr) return cudaErrorInvalidValue;
    const int units_a_pass = (all_units + passes - 1) / passes;
    for (int pass = 0; pass < passes; ++pass) {
        p.first_k_unit = pass * units_a_pass;
        p.k_units = std::min(units_a_pass, all_units - p.first_k_unit);
        p.sums_in = pass > 0 ? static_cast<const float*>(a.workspace) : nullptr;
        p.sums_out = pass + 1 < passes ? static_cast<float*>(a.workspace) : nullptr;
        Configuration c = deep       ? configure_deep(p.k_units, p.m == 1)
                          : p.m == 1 ? configure_single(p.k_units, p.tiles, a.sm_count)
                                     : configure_many(p.k_units, p.tiles, a.sm_count, is_small(a.max_shared_memory));
        if (tuning.units != 0)
            c = {tuning.units,  tuning.chunk_units,  tuning.blocks_per_sm, tuning.groups,
                 tuning.stages, tuning.early_stages, tuning.cluster};
        const cudaError_t e =
            a.dtype == DType::float16 ? launch_configured<Float16>(p, c, a) : launch_configured<BFloat16>(p, c, a);
        if (e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

}  // namespace fp4linear::cuda
