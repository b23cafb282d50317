// gemm_fused on SM90: y^T = W x^T by wgmma, the weight decoded in flight.
//
// A block has a producer warp and `Groups` warpgroups, each with 64 rows of W (four 16-row tiles of the prepacked
// layout, one a warp) and all `Tokens` tokens of the tile. The producer fills a ring of stages: x by tensor copies with
// the 128-byte swizzle, the weight by bulk copies, requested before the previous kernel has finished. A lane's code
// word is its quarter of wgmma's register A operand: it is decoded and scaled in registers, into one of `Sets` sets of
// fragments, while the tensor cores work on the others. A stage has a multiple of four slices of 16 K, so the sets
// alternate across stages as well.
//
// Blocks that stay: each takes whole tiles, and an equal part, along K, of those that are left over. Or each of these
// has a block of its own, but for the first part of K, which a helper takes of two or three tiles. A part of a tile
// goes to the workspace, warp by warp and as it lies in registers; the block that has the tile's end adds the parts in
// the order of K. It is the last thing a block does, and it waits for blocks of a lower index alone, which the hardware
// starts first.
//
// Tiles of 256 tokens: two blocks of a cluster have rows one after the other and bring each other half of x, so half as
// much of it leaves the L2 cache. (Where power binds, that is worth 2 to 6 %.)
//
// Few tiles: a cluster of blocks shares a tile, each with its part of K. At the end every block owns a part of the tile
// and receives the others' sums of it in shared memory; they are added in the order of the blocks.
//
// What bounds it (H200, 1.8 GHz, cycles of an SM for 64 rows x 16 K): 36, 42, 56, 74, 80, 118, 134 for 16, 32, 64,
// 96, 128, 192, 256 tokens; the tensor cores alone would take tokens / 2. Decoding is about 24 instructions a lane, of
// which the accumulators' traffic hides little. On random data large products are bound by power: the clock falls.
#pragma once
#include <cuda.h>

#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/gemm_schedule.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/repair.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::device::gemm_wgmma {

using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_k;
using prepacked::unit_rows;

// racecheck sees a barrier's order only for threads that arrive themselves, not through __syncwarp: its build lets
// every lane arrive.
#ifdef FP4LINEAR_RACECHECK
constexpr int arrivals_a_warp = 32;
#else
constexpr int arrivals_a_warp = 1;
#endif
struct WgmmaParameters : Schedule {
    RepairSource source;
    std::uint16_t* y;
    std::int64_t m;
    float smallest;    // sum to trust
    int row_tiles;     // of 16
    int block_tokens;  // that there are in a token block: a multiple of 8 (of a pair 16), all of the tile's or fewer
    int splits;        // blocks of a cluster
    int stages;
    std::uint32_t* flags;  // [part][warp]: the part of a tile is in `partials`
    float4* partials;      // [part][warp][column][lane]; of pairs a part is two blocks
    bool vector_stores;    // rows of y start at multiples of 16 bytes
};

__device__ __forceinline__ int uniform(std::uint32_t v) { return __shfl_sync(0xFFFFFFFFu, static_cast<int>(v), 0); }

// Registers move from a whole warpgroup around the producer to the others where these need more than the launch gives.
struct Registers {
    int producer = 0;  // 0: a lone producer warp, as many registers for all
    int consumer = 0;
};
__host__ __device__ constexpr Registers registers_of(int tokens) {
    return tokens < 128 ? Registers{} : Registers{24, 240};
}
constexpr int threads_of(int tokens, int groups) {
    return groups * 128 + (registers_of(tokens).producer > 0 ? 128 : 32);
}

template <class T, int Tokens, int Groups, int StageUnits, int Sets, int Slices, int MinBlocks, bool Clustered,
          bool Paired>
__global__ void __launch_bounds__(threads_of(Tokens, Groups), MinBlocks)
    gemm_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ WgmmaParameters p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) std::uint8_t shared[];
    constexpr int warps = Groups * group_warps;
    constexpr int x_unit_bytes = Tokens * unit_k * 2;
    constexpr int x_stage_bytes = StageUnits * x_unit_bytes;
    constexpr int weight_stage_bytes = warps * StageUnits * unit_bytes;
    constexpr int columns = Tokens / 8;  // of D: 8 tokens
    constexpr bool lines = stores_lines(Tokens, Clustered);
    constexpr bool may_help = !Clustered && Tokens >= least_helped_tokens;  // the schedule may have helpers
    constexpr int staging_bytes = staging_bytes_of(Tokens, Clustered);
    static_assert(StageUnits * 4 % (Sets * Slices) == 0 && 4 % Slices == 0);

    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x) / 32, 0);
    const std::uint32_t x_ring = shared_address(shared);
    const std::uint32_t weight_ring = x_ring + p.stages * x_stage_bytes;
    const std::uint32_t staging = weight_ring + p.stages * weight_stage_bytes;
    const std::uint32_t full = staging + warps * staging_bytes;
    const std::uint32_t empty = full + p.stages * 8;

    launch_dependents();
    static_assert(!(Clustered && Paired));
    const int splits = Clustered ? p.splits : 1;
    const int rank = static_cast<int>(blockIdx.x) % (Paired ? 2 : splits);
    // Who takes tiles: a block, or two of a cluster with the rows of one after those of the other, which bring each
    // other half of x.
    constexpr int team = Paired ? 2 : 1;
    const int worker = static_cast<int>(blockIdx.x) / team;
    const int workers = static_cast<int>(gridDim.x) / team;
    const auto rows_at = [&](const Tile& tile) { return tile.row_block * team + (Paired ? rank : 0); };
    // Where the pieces begin is worked out once, and kept in shared memory.
    const std::uint32_t range_address = empty + p.stages * 8;
    // In a cluster: the barrier of the other blocks' sums, and these.
    const std::uint32_t sums = range_address;
    [[maybe_unused]] const std::uint32_t parts = parts_in_ring(Tokens) ? x_ring : range_address + 16;
    const auto piece = [&](int i, Piece& out) {
        if constexpr (Clustered) {
            out = {static_cast<int>(blockIdx.x) / splits, rank * p.k_units / splits, (rank + 1) * p.k_units / splits};
            return i == 0;
        } else {
            const uint4 r = load_shared_128(range_address);
            // The shuffles tell the compiler that a warp agrees: what follows from it stays in uniform registers.
            return piece_at<may_help>(p, {uniform(r.x), uniform(r.y), uniform(r.z), uniform(r.w)}, worker, workers, i,
                                      out);
        }
    };

    if (warp == warps && lane == 0) {
        prefetch_tensor_map(&x_map);
        for (int s = 0; s < p.stages; ++s) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, warps * arrivals_a_warp * team);
        }
        if constexpr (Clustered) mbarrier_init(sums, 1);
        fence_mbarrier_init();
        if constexpr (Clustered) {
            constexpr int chunks = columns * warps;
            mbarrier_expect_bytes(sums, (first_owned(rank + 1, splits, chunks) - first_owned(rank, splits, chunks)) *
                                            (splits - 1) * chunk_bytes);
        } else {
            const SharedRange r = shared_range(p, worker);
            store_shared_128(range_address, make_uint4(r.first_tile, r.first_k, r.last_tile, r.last_k));
        }
    }
    // Rows that no copy fills: zeros, once, so that their sums are finite. (A tensor copy of rows beyond M is slow.)
    if (p.block_tokens < Tokens) {
        const int bytes = (Tokens - p.block_tokens) * unit_k * 2;
        for (int u = 0; u < p.stages * StageUnits; ++u)
            for (int i = static_cast<int>(threadIdx.x) * 16; i < bytes; i += static_cast<int>(blockDim.x) * 16)
                store_shared_128(x_ring + u * x_unit_bytes + p.block_tokens * unit_k * 2 + i, make_uint4(0, 0, 0, 0));
        fence_async_proxy();
    }
    __syncthreads();
    if constexpr (Clustered || Paired) cluster_arrive_relaxed();

    constexpr Registers registers = registers_of(Tokens);
    if (warp >= warps) {
        if constexpr (registers.producer > 0) release_registers<registers.producer>();
        if (warp > warps) return;
        // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
        const auto request_weight = [&](int row_block, int k, int units, int stage) {
            const int tiles_here = max(0, min(warps, p.row_tiles - row_block * warps));
            const int bytes = units * unit_bytes;
            const int x_bytes = units * p.block_tokens * unit_k * 2;
            if (lane == 0) mbarrier_expect_bytes(full + stage * 8, x_bytes + tiles_here * bytes);
            __syncwarp();
            if (lane < tiles_here)
                bulk_copy(weight_ring + stage * weight_stage_bytes + lane * StageUnits * unit_bytes,
                          p.source.weight +
                              (static_cast<std::int64_t>(row_block * warps + lane) * p.k_units + k) * unit_bytes,
                          bytes, full + stage * 8);
        };
        const auto request_x = [&](int token_block, int k, int units, int stage) {
            if (lane == 0)
#pragma unroll
                for (int u = 0; u < StageUnits; ++u)
                    if (u < units) {
                        const std::uint32_t to = x_ring + stage * x_stage_bytes + u * x_unit_bytes;
                        if constexpr (Paired) {
                            const int half = p.block_tokens / 2;
                            tensor_copy_to_both(to + rank * half * unit_k * 2, &x_map, (k + u) * unit_k,
                                                token_block * p.block_tokens + rank * half, full + stage * 8);
                        } else {
                            tensor_copy(to, &x_map, (k + u) * unit_k, token_block * p.block_tokens, full + stage * 8);
                        }
                    }
        };
        Piece at;
        bool more = piece(0, at);
        int early = 0;
        if (more) {
            const Tile tile = tile_at(p, at.tile);
            early = min(p.stages, (at.k_end - at.k_begin + StageUnits - 1) / StageUnits);
            for (int s = 0; s < early; ++s) {
                const int k = at.k_begin + s * StageUnits;
                request_weight(rows_at(tile), k, min(StageUnits, at.k_end - k), s);
            }
            wait_for_previous_grid();
            if constexpr (Paired) cluster_wait();  // the other block's barriers are ready
            for (int s = 0; s < early; ++s) {
                const int k = at.k_begin + s * StageUnits;
                request_x(tile.token_block, k, min(StageUnits, at.k_end - k), s);
            }
        } else if constexpr (Paired) {
            cluster_wait();
        }
        int stage = early == p.stages ? 0 : early;
        std::uint32_t phase = early == p.stages ? 0 : 1;  // of `empty`, whose first round needs no wait
        for (int i = 0; more; more = piece(++i, at)) {
            const Tile tile = tile_at(p, at.tile);
            for (int k = at.k_begin + (i == 0 ? early * StageUnits : 0); k < at.k_end; k += StageUnits) {
                const int units = min(StageUnits, at.k_end - k);
                mbarrier_wait(empty + stage * 8, phase);
                request_weight(rows_at(tile), k, units, stage);
                request_x(tile.token_block, k, units, stage);
                if (++stage == p.stages) {
                    stage = 0;
                    phase ^= 1u;
                }
            }
        }
    } else {
        if constexpr (registers.producer > 0) claim_registers<registers.consumer>();
        wait_for_previous_grid();
        if constexpr (Paired) cluster_wait();
        // A stage has been read: both blocks of a pair fill both blocks' stages.
        const auto release = [&](int stage_read) {
            if constexpr (Paired && arrivals_a_warp == 1) {
                if (lane < 2) mbarrier_arrive_in_cluster(address_in_block(empty + stage_read * 8, lane));
            } else if constexpr (Paired) {
                for (int r = 0; r < 2; ++r) mbarrier_arrive_in_cluster(address_in_block(empty + stage_read * 8, r));
            } else {
                if (lane < arrivals_a_warp) mbarrier_arrive(empty + stage_read * 8);
            }
        };
        const int g = lane / 4;
        const int t = lane % 4;
        const std::uint32_t own_units = weight_ring + warp * StageUnits * unit_bytes;
        const std::uint32_t own_staging = staging + warp * staging_bytes;
        const std::uint64_t x_operand = b_descriptor(x_ring);
        int stage = 0;
        std::uint32_t phase = 0;
        // A part of another block's tile is announced once its stores have had the time to arrive.
        [[maybe_unused]] bool owed = false;
        [[maybe_unused]] int owed_part = worker;
        [[maybe_unused]] const auto flag_of = [&](int part) { return p.flags + (part * team + rank) * warps + warp; };
        [[maybe_unused]] const auto publish = [&] {
            __syncwarp();
            if (lane == 0) store_release(flag_of(may_help ? owed_part : worker), 1);
            owed = false;
        };
        Piece at;
        for (int i = 0; piece(i, at); ++i) {
            float scale2[2];
            float bias[2];
            const auto load_scales = [&](std::int64_t first_row) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const std::int64_t row = first_row + g + 8 * h;
                    const bool valid = row < p.source.n;
                    scale2[h] = valid && p.source.scale2_rows != nullptr ? p.source.scale2_rows[row] : p.source.scale2;
                    bias[h] = valid && p.source.bias != nullptr ? p.source.bias[row] : 0.0f;
                }
            };
            constexpr bool early_scales = Tokens <= 64;  // where registers allow
            if constexpr (early_scales)
                load_scales(static_cast<std::int64_t>(rows_at(tile_at(p, at.tile)) * warps + warp) * unit_rows);

            float acc[Tokens / 2];
#pragma unroll
            for (int v = 0; v < Tokens / 2; ++v) acc[v] = 0.0f;
            std::uint32_t fragments[Sets][Slices][4];
            int previous = 0;
            // Codes and scales of a unit, or of half a unit where registers are short.
            constexpr int load_slices = Tokens > 128 ? 1 : 4;
            std::uint32_t words[4];
            std::uint32_t scales[2];
            const auto load_slices_from = [&](std::uint32_t unit, int first) {
                if constexpr (load_slices == 4) {
                    const uint4 c = load_shared_128(unit + lane * 16);
                    const uint2 s = load_shared_64(unit + unit_code_bytes + g * 8);
                    words[0] = c.x, words[1] = c.y, words[2] = c.z, words[3] = c.w;
                    scales[0] = s.x, scales[1] = s.y;
                } else {
                    words[first] = load_shared_32(unit + lane * 16 + first * 4);
                    if (first % 2 == 0) scales[first / 2] = load_shared_32(unit + unit_code_bytes + g * 8 + first * 2);
                }
            };
            // A unit's 64 K, whose words are loaded. Once its first groups are on their way, `next` loads the following
            // ones.
            const auto multiply_unit = [&](std::uint32_t unit, std::uint64_t operand, int first_set, bool stage_done,
                                           const auto& next) {
                std::uint32_t scale_pairs[2];
                const std::uint32_t unit_words[4] = {words[0], words[1], words[2], words[3]};
                const std::uint32_t unit_scales[2] = {scales[0], scales[1]};
#pragma unroll
                for (int s = 0; s < 4; s += Slices) {
                    std::uint32_t (&set)[Slices][4] = fragments[(first_set + s / Slices) % Sets];
                    wgmma_wait<Sets - 1>();
                    // All of the stage before has been multiplied.
                    if (s / Slices == Sets - 1 && stage_done) release(previous);
#pragma unroll
                    for (int j = s; j < s + Slices; ++j) {
                        std::uint32_t (&a)[4] = set[j - s];
                        T::decode(load_slices == 4 ? unit_words[j] : words[j], a);
                        if (j % 2 == 0) {
                            const std::uint32_t bytes = load_slices == 4 ? unit_scales[j / 2] : scales[j / 2];
                            scale_pairs[0] = T::scale_pair(bytes, 0);
                            scale_pairs[1] = T::scale_pair(bytes, 1);
                        }
#pragma unroll
                        for (int r = 0; r < 4; ++r) a[r] = T::multiply(a[r], twice(scale_pairs[r % 2], j % 2 != 0));
                        if (load_slices == 1 && j + 1 < 4) load_slices_from(unit, j + 1);
                    }
                    wgmma_fence();
#pragma unroll
                    for (int j = s; j < s + Slices; ++j) wgmma<Tokens>(T{}, acc, set[j - s], operand + j * 2);
                    wgmma_commit();
                    if (s + Slices == (load_slices == 1 ? 4 : 2)) next();
                }
            };
            constexpr int unit_groups = 4 / Slices;
            constexpr std::uint32_t operand_unit = x_unit_bytes >> 4;
            static_assert(unit_groups % Sets == 0);  // or the sets would not alternate from unit to unit
            const auto next_stage = [&] {
                previous = stage;
                if (++stage == p.stages) {
                    stage = 0;
                    phase ^= 1u;
                }
            };
            int k = at.k_begin;
            for (; k + StageUnits <= at.k_end; k += StageUnits) {
                if constexpr (!Clustered)
                    if (owed && k > at.k_begin) publish();
                const int at_stage = Tokens <= 64 ? uniform(stage) : stage;
                mbarrier_wait(full + at_stage * 8, phase);
                const std::uint32_t units = own_units + at_stage * weight_stage_bytes;
                const std::uint64_t operand = x_operand + static_cast<std::uint32_t>(at_stage * (x_stage_bytes >> 4));
                load_slices_from(units, 0);
#pragma unroll
                for (int u = 0; u < StageUnits; ++u)
                    multiply_unit(units + u * unit_bytes, operand + u * operand_unit, u * unit_groups,
                                  u == 0 && k > at.k_begin, [&] {
                                      if (u + 1 < StageUnits) load_slices_from(units + (u + 1) * unit_bytes, 0);
                                  });
                next_stage();
            }
            if (StageUnits > 1 && k < at.k_end) {  // the rest, a unit at a time
                const int at_stage = Tokens <= 64 ? uniform(stage) : stage;
                mbarrier_wait(full + at_stage * 8, phase);
                const std::uint32_t units = own_units + at_stage * weight_stage_bytes;
                const std::uint64_t operand = x_operand + static_cast<std::uint32_t>(at_stage * (x_stage_bytes >> 4));
#pragma unroll 1
                for (int u = 0; u < at.k_end - k; ++u) {
                    load_slices_from(units + u * unit_bytes, 0);
                    multiply_unit(units + u * unit_bytes, operand + u * operand_unit, 0, u == 0 && k > at.k_begin,
                                  [] {});
                }
                next_stage();
            }
            wgmma_wait<0>();
            if (at.k_end > at.k_begin) release(previous);

            if constexpr (!Clustered) {
                const auto place = [&](int part) {
                    return p.partials + (static_cast<std::int64_t>(part * team + rank) * warps + warp) * columns * 32 +
                           lane;
                };
                if constexpr (may_help)  // else it has been, or this is the first piece
                    if (owed) publish();
                if (at.k_end < p.k_units) {  // the tile is another block's
                    if constexpr (may_help) owed_part = given_part<may_help>(p, at.tile, worker);
                    float4* const out = place(may_help ? owed_part : worker);
#pragma unroll
                    for (int c = 0; c < columns; ++c)
                        __stcg(out + c * 32, make_float4(acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]));
                    owed = true;
                    continue;
                }
                if (owed) publish();
                if (at.k_begin > 0) {
                    const PartRange parts_of_tile = awaited_parts<may_help>(p, at.tile, worker);
                    // The whole warp asks together: a divergent loop would cost the main loop its uniform registers.
                    for (int part = parts_of_tile.first; part < parts_of_tile.end; part += 32) {
                        std::uint32_t* const flag = flag_of(min(part + lane, parts_of_tile.end - 1));
                        while (!__all_sync(0xFFFFFFFFu, load_acquire(flag) != 0)) {
                        }
                        *flag = 0;  // as the next launch expects it
                    }
                    __syncwarp();
#pragma unroll(Tokens <= 16 ? 4 : 1)
                    for (int part = parts_of_tile.first; part < parts_of_tile.end; ++part) {
                        const float4* const in = place(part);
#pragma unroll
                        for (int c = 0; c < columns; ++c) {
                            const float4 v = __ldcg(in + c * 32);
                            acc[4 * c] += v.x;
                            acc[4 * c + 1] += v.y;
                            acc[4 * c + 2] += v.z;
                            acc[4 * c + 3] += v.w;
                        }
                    }
                }
            }

            // owned: columns (of 8 tokens) that this warp finishes.
            const auto owned = [&]([[maybe_unused]] int column) {
                if constexpr (Clustered) return (column * warps + warp) * splits / (columns * warps) == rank;
                return true;
            };
            if constexpr (Clustered) {
                constexpr int chunks = columns * warps;
                const int most = (chunks + splits - 1) / splits;  // that a block owns
                cluster_wait();                                   // every block has started
                if constexpr (parts_in_ring(Tokens)) {
                    cluster_arrive_relaxed();
                    cluster_wait();  // no block reads its ring any more
                }
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    const int chunk = c * warps + warp;
                    const int owner = chunk * splits / chunks;
                    if (owner != rank) {
                        const int slot = rank < owner ? rank : rank - 1;
                        const int place = slot * most + chunk - first_owned(owner, splits, chunks);
                        const float four[4] = {acc[4 * c], acc[4 * c + 1], acc[4 * c + 2], acc[4 * c + 3]};
                        store_async_128(address_in_block(parts + place * chunk_bytes + lane * 16, owner), four,
                                        address_in_block(sums, owner));
                    }
                }
                mbarrier_wait(sums, 0);
#pragma unroll
                for (int c = 0; c < columns; ++c) {
                    if (!owned(c)) continue;
                    const int place = c * warps + warp - first_owned(rank, splits, chunks);
                    float sum[4] = {};
                    for (int s = 0; s < splits; ++s) {
                        if (s == rank) {
#pragma unroll
                            for (int v = 0; v < 4; ++v) sum[v] += acc[4 * c + v];
                        } else {
                            const uint4 part = load_shared_128(
                                parts + ((s < rank ? s : s - 1) * most + place) * chunk_bytes + lane * 16);
                            sum[0] += __uint_as_float(part.x);
                            sum[1] += __uint_as_float(part.y);
                            sum[2] += __uint_as_float(part.z);
                            sum[3] += __uint_as_float(part.w);
                        }
                    }
#pragma unroll
                    for (int v = 0; v < 4; ++v) acc[4 * c + v] = sum[v];
                }
            }

            const Tile tile = tile_at(p, uniform(at.tile));  // worked out here: not kept in registers across the loop
            const int row_tile = rows_at(tile) * warps + warp;
            const std::int64_t first_row = static_cast<std::int64_t>(row_tile) * unit_rows;
            const bool exists = row_tile < p.row_tiles;
            if (!lines && !exists) continue;
            if constexpr (!early_scales) load_scales(first_row);
            // Bit c: column c's even or odd token of this lane holds a sum for repair.
            std::uint32_t marks[2] = {0, 0};
            float not_finite_parts[4] = {};
#pragma unroll
            for (int v = 0; v < Tokens / 2; ++v) not_finite_parts[v % 4] = fmaf(acc[v], 0.0f, not_finite_parts[v % 4]);
            const float not_finite =
                not_finite_parts[0] + not_finite_parts[1] + not_finite_parts[2] + not_finite_parts[3];
            const bool bad_scale2 = scale2_out_of_range(scale2[0]) || scale2_out_of_range(scale2[1]);
            const bool repair = exists && __any_sync(0xFFFFFFFFu, bad_scale2 || p.smallest > 0.0f ||
                                                                      (T::weight_exponent == -7 && not_finite != 0.0f));
            const bool all = repair && __any_sync(0xFFFFFFFFu, bad_scale2);
            const float factor[2] = {scale2[0] * static_cast<float>(1 << -T::weight_exponent),
                                     scale2[1] * static_cast<float>(1 << -T::weight_exponent)};
            const std::int64_t first_token = static_cast<std::int64_t>(tile.token_block) * p.block_tokens;
            const int tokens_here = static_cast<int>(min(p.m - first_token, std::int64_t{p.block_tokens}));
            // The outputs of 16 tokens from column c on, rounded, to the staging area.
            const auto stage_outputs = [&](int c, std::uint32_t address) {
                if (repair) {
#pragma unroll
                    for (int v = 0; v < 8; ++v)
                        if (all ||
                            (first_row + g + 8 * (v / 2 % 2) < p.source.n && suspicious<T>(acc[4 * c + v], p.smallest)))
                            marks[v % 2] |= 1u << (c + v / 4);
                }
                std::uint32_t packed[4];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const int v = 4 * (c + q / 2) + 2 * (q % 2);
                    packed[q] = pack(T{}, fmaf(acc[v], factor[q % 2], bias[q % 2]),
                                     fmaf(acc[v + 1], factor[q % 2], bias[q % 2]));
                }
                store_matrix_x4_transposed(address, packed[0], packed[1], packed[2], packed[3]);
            };
            const auto store_eight = [&](std::uint16_t* out, std::int64_t row, std::uint32_t address) {
                const uint4 eight = load_shared_128(address);
                if (p.vector_stores) {
                    *reinterpret_cast<uint4*>(out) = eight;
                } else {
                    const std::uint32_t pairs_of_y[4] = {eight.x, eight.y, eight.z, eight.w};
                    const int count = static_cast<int>(min(std::int64_t{8}, p.source.n - row));
#pragma unroll
                    for (int r = 0; r < 8; ++r)
                        if (r < count) out[r] = static_cast<std::uint16_t>(pairs_of_y[r / 2] >> r % 2 * 16);
                }
            };
            if constexpr (lines) {
                const int group = warp / group_warps;
                const int thread = static_cast<int>(threadIdx.x) % (group_warps * 32);
                // Swizzled: neither the matrices' rows nor a line's pieces meet in a bank.
                const auto place = [&](int buffer, int token, int piece) {
                    return staging + (2 * group + buffer) * (group_warps * staging_bytes / 2) + token * 128 +
                           (piece ^ (token & 7)) * 16;
                };
                const std::int64_t row =
                    (static_cast<std::int64_t>(rows_at(tile)) * warps + group * group_warps) * unit_rows +
                    thread % 8 * 8;
                std::uint16_t* out = p.y + (first_token + thread / 8) * p.source.n + row;
#pragma unroll
                for (int chunk = 0; chunk < columns / 4; ++chunk) {
                    if (chunk * 32 < tokens_here) {
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            stage_outputs(4 * chunk + 2 * half, place(chunk % 2, half * 16 + lane / 16 * 8 + lane % 8,
                                                                      warp % group_warps * 2 + lane / 8 % 2));
                        barrier_sync(1 + group, group_warps * 32);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int token = thread / 8 + 16 * half;
                            if (chunk + half > 0) {
                                out += 16 * p.source.n;
                                asm volatile("" : "+l"(out));  // one pointer, not one a column
                            }
                            if (chunk * 32 + token < tokens_here && row < p.source.n)
                                store_eight(out, row, place(chunk % 2, token, thread % 8));
                        }
                    }
                }
                // The buffers have been read, and no warp's store comes behind another's repair of its rows.
                barrier_sync(1 + group, group_warps * 32);
            } else {
                const int tokens_left = tokens_here - lane / 2;
                const std::int64_t row = first_row + lane % 2 * 8;
                std::uint16_t* out = p.y + (first_token + lane / 2) * p.source.n + row;
                // 16 tokens at a time in each of the two buffers.
                const auto place = [&](int buffer, int token, int half) {
                    return own_staging + buffer * (staging_bytes / 2) + token * 32 + (half ^ (token >> 2 & 1)) * 16;
                };
                constexpr int pairs = columns >= 4 ? 2 : 1;
                static_assert(columns % (2 * pairs) == 0);
#pragma unroll
                for (int first_column = 0; first_column < columns; first_column += 2 * pairs) {
                    if (first_column > 0) __syncwarp();  // the buffers have been read
#pragma unroll
                    for (int buffer = 0; buffer < pairs; ++buffer) {
                        const int c = first_column + 2 * buffer;
                        if (Clustered && !owned(c) && !owned(c + 1)) continue;
                        stage_outputs(c, place(buffer, lane / 16 * 8 + lane % 8, lane / 8 % 2));
                    }
                    __syncwarp();
#pragma unroll
                    for (int buffer = 0; buffer < pairs; ++buffer) {
                        const int c = first_column + 2 * buffer;
                        if (c > 0) {
                            out += 16 * p.source.n;
                            asm volatile("" : "+l"(out));  // one pointer, not one a column
                        }
                        if (c * 8 >= tokens_left || row >= p.source.n || !owned(c + lane / 16)) continue;
                        store_eight(out, row, place(buffer, lane / 2, lane % 2));
                    }
                }
            }
            if (repair) {
                __syncwarp();  // what is stored above stays below
                for (int c = 0; c < columns; ++c) {
                    if (!owned(c)) continue;
                    for (int token_here = 0; token_here < 8; ++token_here) {
                        const std::int64_t token = first_token + c * 8 + token_here;
                        const bool marked = t == token_here / 2 && (marks[token_here % 2] >> c & 1u) != 0;
                        if (!__any_sync(0xFFFFFFFFu, marked) || c * 8 + token_here >= tokens_here) continue;
                        std::uint16_t* const out = p.y + token * p.source.n + first_row;
                        repair_tile<T>(p.source, row_tile, token, out, out + 8);
                    }
                }
            }
            __syncwarp();  // the staging area is used again
        }
        if constexpr (!Clustered)
            if (owed) publish();
    }
    if constexpr (Paired) {  // the other block still arrives at this one's barriers
        cluster_arrive_relaxed();
        cluster_wait();
    }
#endif
}

}  // namespace fp4linear::cuda::device::gemm_wgmma
