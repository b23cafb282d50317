// gemm_fused on SM90: which tiles, how K is shared, and the launch. The kernel is in device/gemm_wgmma.cuh.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // nothing uses the helpers of a kernel without a body
#endif

#include "cuda/device/gemm_wgmma.cuh"
#include "cuda/gemm.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using namespace device::gemm_wgmma;

constexpr int flag_bytes = gemm_wgmma_flag_bytes;  // a word for every warp that can share a tile

struct Configuration {
    int tokens;
    int groups;
    int stage_units;
    int stages;
    int splits;
    int blocks_an_sm;  // persistent; 0: a block for every tile
    int raster;
    int least_units;      // of K for a block that shares tiles
    bool extra_wave;      // a wave of whole tiles joins those that are shared
    bool even;            // the same number of blocks for every shared tile
    bool paired = false;  // two blocks share x
};

decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static const auto encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult result;
        const cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
        if (e != cudaSuccess || result != cudaDriverEntryPointSuccess) function = nullptr;
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    return encode;
}

// Boxes of `tokens` rows x 64 K, the swizzle that wgmma reads.
cudaError_t make_x_map(const GemmArguments& a, int tokens, CUtensorMap* map) {
    const auto encode = tensor_map_encoder();
    if (encode == nullptr) return cudaErrorNotSupported;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(a.k), static_cast<cuuint64_t>(a.m)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(a.m == 1 ? a.k : a.x_row_stride) * 2};
    const cuuint32_t box[2] = {unit_k, static_cast<cuuint32_t>(tokens)};
    const cuuint32_t steps[2] = {1, 1};
    const CUresult r = encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, const_cast<void*>(a.x), sizes, strides, box,
                              steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                              CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class T, int Tokens, int Groups, int StageUnits, int Sets, int Slices, int MinBlocks, bool Clustered,
          bool Paired = false>
cudaError_t launch(const GemmArguments& a, const Configuration& c) {
    constexpr auto kernel = gemm_kernel<T, Tokens, Groups, StageUnits, Sets, Slices, MinBlocks, Clustered, Paired>;
    constexpr int warps = Groups * group_warps;
    WgmmaParameters p{};
    p.source = {a.prepacked, static_cast<const std::uint16_t*>(a.x), a.x_row_stride, a.n, a.k, a.scale2_rows, a.bias,
                a.scale2};
    p.y = static_cast<std::uint16_t*>(a.y);
    p.m = a.m;
    p.smallest = smallest_sum<T>(a.k, a.largest_scale2);
    p.row_tiles = static_cast<int>(prepacked::row_tiles(a.n));
    p.k_units = static_cast<int>(prepacked::k_units(a.k));
    constexpr int team = Paired ? 2 : 1;
    p.row_blocks = (p.row_tiles + warps * team - 1) / (warps * team);
    p.token_blocks = static_cast<int>((a.m + Tokens - 1) / Tokens);
    const std::int64_t most_tokens = (a.m + p.token_blocks - 1) / p.token_blocks;
    p.block_tokens = static_cast<int>((most_tokens + 8 * team - 1) / (8 * team) * (8 * team));
    p.raster = c.raster > 0 ? std::min(c.raster, p.token_blocks) : p.token_blocks;
    p.splits = c.splits;
    p.stages = c.stages;
    p.vector_stores = a.n % 8 == 0 && reinterpret_cast<std::uintptr_t>(a.y) % 16 == 0;
    const int ring = c.stages * StageUnits * (Tokens * unit_k * 2 + warps * unit_bytes);
    const int chunks = Tokens / 8 * warps;
    const int parts = Clustered ? (chunks + c.splits - 1) / c.splits * (c.splits - 1) * chunk_bytes : 0;
    const int shared = ring + warps * staging_bytes_of(Tokens, Clustered) + c.stages * 16 + 16 +
                       (Clustered && Tokens <= 64 ? parts : 0);
    if (shared > a.max_shared_memory || (Tokens > 64 && parts > ring)) return cudaErrorInvalidConfiguration;
    const int tiles = p.row_blocks * p.token_blocks;
    int blocks = tiles * c.splits;
    if constexpr (!Clustered) {
        const int workers = c.blocks_an_sm > 0 ? c.blocks_an_sm * a.sm_count / team : tiles;
        blocks = team * share_tiles(p, workers, {c.least_units, c.extra_wave, c.even});
        p.flags = static_cast<std::uint32_t*>(a.workspace);
        p.partials = reinterpret_cast<float4*>(static_cast<std::uint8_t*>(a.workspace) + flag_bytes);
        if (p.shared_tiles > 0) {
            if (a.workspace == nullptr) return cudaErrorInvalidValue;
            if (blocks * warps * 4 > flag_bytes) return cudaErrorInvalidConfiguration;
        }
    }
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    CUtensorMap x_map;
    if (const cudaError_t e = make_x_map(a, p.block_tokens / team, &x_map)) return e;

    Launch launch(dim3(static_cast<unsigned>(blocks)), dim3(threads_of(Tokens, Groups)),
                  static_cast<std::size_t>(shared), a.stream);
    if (a.programmatic_launch) launch.overlap_previous();
    if constexpr (Clustered) launch.cluster(c.splits);
    if constexpr (Paired) launch.cluster(2);
    return launch.run(kernel, x_map, p);
}

template <class T>
cudaError_t launch_configured(const GemmArguments& a, const Configuration& c) {
    if (c.paired)
        return c.tokens == 256 ? launch<T, 256, 2, 1, 2, 1, 1, false, true>(a, c) : cudaErrorInvalidConfiguration;
#define FP4LINEAR_TRY(clustered, tokens_, groups_, units_, sets, slices, blocks)                              \
    if (c.tokens == tokens_ && c.groups == groups_ && c.stage_units == units_ && (c.splits > 1) == clustered) \
        return launch<T, tokens_, groups_, units_, sets, slices, blocks, clustered>(a, c);
    FP4LINEAR_TRY(false, 16, 1, 4, 2, 2, 3)
    FP4LINEAR_TRY(false, 32, 1, 4, 2, 2, 3)
    FP4LINEAR_TRY(false, 64, 1, 2, 2, 2, 3)
    FP4LINEAR_TRY(false, 16, 2, 4, 2, 2, 2)
    FP4LINEAR_TRY(false, 32, 2, 4, 2, 2, 2)
    FP4LINEAR_TRY(false, 64, 2, 2, 2, 2, 2)
    FP4LINEAR_TRY(false, 128, 2, 2, 2, 1, 1)
    FP4LINEAR_TRY(false, 256, 2, 1, 2, 1, 1)
    FP4LINEAR_TRY(true, 16, 1, 4, 2, 2, 3)
    FP4LINEAR_TRY(true, 32, 1, 4, 2, 2, 3)
    FP4LINEAR_TRY(true, 64, 1, 2, 2, 2, 3)
    FP4LINEAR_TRY(true, 128, 2, 2, 2, 1, 1)
#undef FP4LINEAR_TRY
    return cudaErrorInvalidConfiguration;
}

// What the choice rests on, measured on one H200: cycles of an SM for 64 rows x 16 K, and what a launch takes beside
// that (its start, the sums of shared tiles, y), where tiles are shared and where they are not.
struct Cost {
    int tokens;
    double cycles;
    double shared_us;
    double whole_us;
};
constexpr Cost costs[] = {
    {16, 36, 3.5, 3.5}, {32, 42, 4.3, 4.3}, {64, 56, 5.4, 5.4}, {128, 80, 7, 4}, {256, 134, 11.5, 6}};
constexpr double cycles_a_us = 1800;
constexpr int short_k_units = 16;
constexpr int least_k_units_of_eight = 24;  // for clusters of eight; twice as many where smaller ones fill the GPU too
constexpr int pair_waste = 16;              // row blocks for which a pair may have one too many
constexpr double large_x_bytes = 100e6;
constexpr double large_x_gain = 1.07;     // of blocks that the hardware hands out, with such an x
constexpr double cached_x_bytes = 36e6;   // of the 60 MB of L2
constexpr int cluster_steps_an_sm = 200;  // of 64 rows x 16 K: above, blocks that stay are better than clusters
constexpr int small_tile_steps_an_sm =
    1000;  // above, two warpgroups a block are better than one; half that with 32 tokens

Configuration whole_tiles(int tokens) {
    switch (tokens) {
        case 16: return {16, 2, 4, 4, 1, 0, 0, 1, false, false};
        case 32: return {32, 2, 4, 3, 1, 0, 0, 1, false, false};
        case 64: return {64, 2, 2, 4, 1, 0, 0, 1, false, false};
        case 128: return {128, 2, 2, 5, 1, 0, 0, 1, false, false};
        default: return {256, 2, 1, 5, 1, 0, 0, 1, false, false};
    }
}
// One warpgroup a block, three blocks an SM.
Configuration small_tiles(int tokens) {
    switch (tokens) {
        case 16: return {16, 1, 4, 4, 1, 3, 0, 4, false, false};
        case 32: return {32, 1, 4, 2, 1, 3, 0, 4, false, false};
        default: return {64, 1, 2, 3, 1, 3, 0, 4, false, false};
    }
}

Configuration choose(const GemmArguments& a) {
    const std::int64_t rows_64 = (prepacked::row_tiles(a.n) + group_warps - 1) / group_warps;
    const int k_units = static_cast<int>(prepacked::k_units(a.k));
    const auto blocks_of = [&](int tokens) { return (a.m + tokens - 1) / tokens; };
    if (a.batch_invariant) {
        // How K is split depends on N and K alone. The tile does not matter to the bits.
        int splits = 1;
        while (splits < 8 && rows_64 * splits <= a.sm_count && splits * 8 <= k_units) splits *= 2;
        const int tokens = a.m <= 16 ? 16 : a.m <= 32 ? 32 : a.m <= 64 ? 64 : 128;
        Configuration c = splits > 1 && tokens <= 64 ? small_tiles(tokens) : whole_tiles(tokens);
        c.splits = splits;
        c.blocks_an_sm = 0;
        return c;
    }
    const std::int64_t blocks_of_eight = rows_64 * blocks_of(32) * 8;
    if (blocks_of_eight <= std::int64_t{2} * a.sm_count &&
        k_units >= (blocks_of_eight > a.sm_count ? least_k_units_of_eight : 2 * least_k_units_of_eight)) {
        Configuration c = small_tiles(32);  // few tiles: many blocks for each
        c.splits = 8;
        c.blocks_an_sm = 0;
        return c;
    }
    const double x_bytes = static_cast<double>(a.m) * static_cast<double>(a.k) * 2;
    const Cost* best = nullptr;
    double best_us = 0;
    bool whole = false;
    for (const Cost& cost : costs) {
        const std::int64_t tiles_64 = rows_64 * blocks_of(cost.tokens);
        const double even_us =
            cost.shared_us + static_cast<double>(tiles_64) * k_units * 4 * cost.cycles / a.sm_count / cycles_a_us;
        double us = even_us;
        bool whole_here = false;
        if (cost.tokens >= 128) {
            const std::int64_t tiles = (rows_64 + 1) / 2 * blocks_of(cost.tokens);
            const std::int64_t waves = (tiles + a.sm_count - 1) / a.sm_count;
            const double whole_us =
                static_cast<double>(waves) * (cost.whole_us + 2 * k_units * 4 * cost.cycles / cycles_a_us);
            // More waves than one gain from blocks that stay, but for short sums, or an x that no cache holds.
            whole_here = x_bytes > large_x_bytes ? whole_us < even_us * large_x_gain
                                                 : (waves == 1 || k_units <= short_k_units) && whole_us < even_us;
            if (whole_here) us = whole_us;
        }
        if (best == nullptr || us < best_us) {
            best = &cost;
            best_us = us;
            whole = whole_here;
        }
    }
    const int tokens = best->tokens;
    const std::int64_t tiles_64 = rows_64 * blocks_of(tokens);
    const std::int64_t steps_an_sm = tiles_64 * k_units * 4 / a.sm_count;
    Configuration c = whole_tiles(tokens);
    if (tokens <= 64 && steps_an_sm < small_tile_steps_an_sm / (tokens == 32 ? 2 : 1)) {
        c = small_tiles(tokens);
        if (tiles_64 > 128 && k_units <= short_k_units) {
            c.blocks_an_sm = 0;
        } else if (tiles_64 <= 128 && steps_an_sm <= cluster_steps_an_sm) {
            const int splits = tiles_64 <= 8 ? 8 : tiles_64 <= 32 ? 4 : tiles_64 > 64 ? 2 : tokens == 32 ? 4 : 3;
            c.splits = std::max(1, std::min(splits, (k_units + 1) / 3));
            c.blocks_an_sm = 0;
        }
        return c;
    }
    const std::int64_t row_blocks = (rows_64 + 1) / 2;
    c.paired = tokens == 256 && row_blocks % 2 * pair_waste <= row_blocks;
    // x beyond the L2 cache: a few token tiles at a time.
    c.raster = x_bytes > large_x_bytes ? 8 : x_bytes > cached_x_bytes ? 4 : 0;
    if (whole) {
        // Short sums: blocks that stay bring the next tile while they store one.
        if (k_units <= short_k_units && row_blocks * blocks_of(tokens) > a.sm_count) {
            c.blocks_an_sm = 1;
            c.least_units = k_units;
        }
        return c;
    }
    c.blocks_an_sm = tokens <= 64 ? 2 : 1;
    c.least_units = 4;
    const std::int64_t blocks = static_cast<std::int64_t>(c.blocks_an_sm) * a.sm_count;
    const std::int64_t tiles = row_blocks * blocks_of(tokens);
    const std::int64_t left_over = tiles % blocks;
    // Many blocks for each left-over tile cost more than two for every tile of a wave.
    c.extra_wave = tiles > blocks && (left_over * 8 <= blocks || (tiles < 2 * blocks && left_over * 2 <= blocks));
    c.even = tiles * 2 <= blocks;
    return c;
}

}  // namespace

cudaError_t gemm_wgmma_compiled(bool* compiled) {
    constexpr int registers_of_no_body = 32;  // at most: such a kernel has nothing to keep
    cudaFuncAttributes attributes{};
    const cudaError_t e = cudaFuncGetAttributes(&attributes, gemm_kernel<Float16, 64, 1, 2, 2, 2, 3, false, false>);
    if (e == cudaSuccess) *compiled = attributes.numRegs > registers_of_no_body;
    return e;
}

bool gemm_wgmma_supports(const GemmArguments& a) {
    return a.wgmma && a.kernel_arch == 90 && prepacked::supports(a.k, prepacked::slice_k);
}

std::size_t gemm_wgmma_workspace(const GemmArguments& a) {
    // A block shares at most one tile that it leaves to another: 128 x 256 sums an SM are the most.
    return flag_bytes + static_cast<std::size_t>(a.sm_count) * 128 * 256 * sizeof(float);
}

cudaError_t gemm_wgmma(const GemmArguments& a, const GemmWgmmaTuning& tuning) {
    if (a.m == 0 || a.n == 0) return cudaSuccess;
    if (!gemm_wgmma_supports(a)) return cudaErrorNotSupported;
    if (reinterpret_cast<std::uintptr_t>(a.x) % 16 != 0 || a.x_row_stride % 8 != 0) return cudaErrorInvalidValue;
    Configuration c = choose(a);
    if (tuning.tokens != 0)
        c = {
            tuning.tokens,       tuning.groups, tuning.stage_units, tuning.stages,           std::max(tuning.splits, 1),
            tuning.blocks_an_sm, tuning.raster, tuning.least_units, tuning.sharing % 2 != 0, tuning.sharing >= 2,
            tuning.splits < 0};
    return a.dtype == DType::float16 ? launch_configured<Float16>(a, c) : launch_configured<BFloat16>(a, c);
}

}  // namespace fp4linear::cuda
