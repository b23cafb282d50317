// gemm_fused with mma.m16n8k16, for every M on SM80 and later; few tokens have a kernel of their own
// (gemm_mma_stream.cu).
//
// A block computes Warps * 32 rows of W by TokenTiles * 8 tokens; a warp has 32 rows and all the tokens, so that a
// weight is decoded once a block, into registers: a lane's code word is its A operand. Stages of 64 K hold the weight's
// units as they are and x in rows of 128 bytes, whose 16-byte parts are XORed with the row so that ldmatrix meets no
// bank conflict. Few tiles: K is split, the sums go to the workspace as fragments, and a second kernel adds them in
// order.
#include "cuda/gemm_mma.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/device/fp4.cuh"
#include "cuda/device/gemm_mma.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/gemm.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using prepacked::unit_bytes;
using prepacked::unit_code_bytes;
using prepacked::unit_k;
using prepacked::unit_rows;

constexpr int stages = 4;
constexpr int warp_row_tiles = 2;
constexpr int x_row_bytes = unit_k * 2;
constexpr int fragment_floats = 128;  // 16 rows x 8 tokens
constexpr int reduce_warps = 4;
constexpr int most_raster_blocks = 8;

struct GeneralParameters {
    GemmOutput out;
    float* sums;  // [splits][row_tiles][token_tiles] fragments, or null
    std::int64_t row_tiles;
    std::int64_t token_tiles;
    int row_blocks;
    int token_blocks;
    int raster;  // token blocks that are worked on together
    int k_units;
    int splits;
    bool vector_stores;  // rows of y start at multiples of 16 bytes
};

template <int Warps, int TokenTiles>
struct Shape {
    static constexpr int row_tiles = Warps * warp_row_tiles;
    static constexpr int rows = row_tiles * unit_rows;
    static constexpr int tokens = TokenTiles * 8;
    static constexpr int weight_bytes = row_tiles * unit_bytes;
    static constexpr int stage_bytes = weight_bytes + tokens * x_row_bytes;
    static constexpr int y_pitch = rows * 2 + 16;  // bytes of a token's outputs on their way to y
    static constexpr int flag_words = row_tiles * ((tokens + 31) / 32);
    static constexpr int shared_bytes = std::max(stages * stage_bytes, tokens* y_pitch + flag_words * 4);
};

template <class T, int Warps, int TokenTiles>
__global__ void __launch_bounds__(Warps * 32, Warps == 8 ? 2 : 3)
    general_kernel(const __grid_constant__ GeneralParameters p) {
#if __CUDA_ARCH__ >= 800
    using S = Shape<Warps, TokenTiles>;
    extern __shared__ __align__(128) std::uint8_t shared[];
    const std::uint32_t base = shared_address(shared);
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    launch_dependents();

    // Token blocks of a raster group take turns: they share the weight in L2.
    const int split = static_cast<int>(blockIdx.y);
    const int group_blocks = p.raster * p.row_blocks;
    const int group = static_cast<int>(blockIdx.x) / group_blocks;
    const int in_group = static_cast<int>(blockIdx.x) - group * group_blocks;
    const int width = min(p.raster, p.token_blocks - group * p.raster);
    const int row_block = in_group / width;
    const std::int64_t first_token = (static_cast<std::int64_t>(group) * p.raster + in_group % width) * S::tokens;
    const std::int64_t first_tile = static_cast<std::int64_t>(row_block) * S::row_tiles;
    const int first_k = static_cast<int>(static_cast<std::int64_t>(p.k_units) * split / p.splits);
    const int steps = static_cast<int>(static_cast<std::int64_t>(p.k_units) * (split + 1) / p.splits) - first_k;

    // Row tiles past N and tokens past M are the last ones again; what becomes of them is not stored.
    constexpr int weight_parts = S::weight_bytes / 16;
    constexpr int unit_parts = unit_bytes / 16;
    const auto copy_weight = [&](int stage, int step) {
#pragma unroll
        for (int i = 0; i < (weight_parts + Warps * 32 - 1) / (Warps * 32); ++i) {
            const int part = i * Warps * 32 + static_cast<int>(threadIdx.x);
            if (weight_parts % (Warps * 32) != 0 && part >= weight_parts) break;
            const int row_tile = part / unit_parts;
            const std::int64_t tile = min(first_tile + row_tile, p.row_tiles - 1);
            async_copy_16(base + stage * S::stage_bytes + part * 16,
                          p.out.source.weight + (tile * p.k_units + first_k + step) * unit_bytes +
                              (part - row_tile * unit_parts) * 16);
        }
    };
    const auto copy_x = [&](int stage, int step) {
        constexpr int parts = S::tokens * 8;
#pragma unroll
        for (int i = 0; i < (parts + Warps * 32 - 1) / (Warps * 32); ++i) {
            const int part = i * Warps * 32 + static_cast<int>(threadIdx.x);
            const int row = part / 8;
            const std::int64_t token = min(first_token + row, p.out.m - 1);
            async_copy_16(
                base + stage * S::stage_bytes + S::weight_bytes + row * x_row_bytes + ((part % 8) ^ (row % 8)) * 16,
                p.out.source.x + token * p.out.source.x_row_stride +
                    static_cast<std::int64_t>(first_k + step) * unit_k + part % 8 * 8);
        }
    };
    static_assert(S::tokens * 8 % (Warps * 32) == 0);

    // The weight is the layer's own and finished long ago: its reads need not wait for the previous kernel.
#pragma unroll
    for (int s = 0; s < stages - 1; ++s)
        if (s < steps) copy_weight(s, s);
    wait_for_previous_grid();
#pragma unroll
    for (int s = 0; s < stages - 1; ++s) {
        if (s < steps) copy_x(s, s);
        async_copy_commit();
    }

    float acc[warp_row_tiles][TokenTiles][4] = {};
    const std::uint32_t x_lane =
        S::weight_bytes + (lane % 8 + lane / 16 * 8) * x_row_bytes + (((lane / 8 % 2) ^ (lane % 8)) * 16);
    const std::uint32_t weight_lane = warp * warp_row_tiles * unit_bytes;
    int stage = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        async_copy_wait<stages - 2>();
        __syncthreads();
        {
            const int next = step + stages - 1;
            const int next_stage = stage == 0 ? stages - 1 : stage - 1;
            if (next < steps) {
                copy_weight(next_stage, next);
                copy_x(next_stage, next);
            }
            async_copy_commit();
        }
        const std::uint32_t here = base + stage * S::stage_bytes;
        std::uint32_t words[warp_row_tiles][4];
        uint4 scales[warp_row_tiles];
#pragma unroll
        for (int r = 0; r < warp_row_tiles; ++r) {
            const std::uint32_t unit = here + weight_lane + r * unit_bytes;
            const uint4 codes = load_shared_128(unit + lane * 16);
            words[r][0] = codes.x, words[r][1] = codes.y, words[r][2] = codes.z, words[r][3] = codes.w;
            scales[r] = decode_scales<T>(load_shared_64(unit + unit_code_bytes + lane / 4 * 8));
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
            std::uint32_t b[TokenTiles][2];
            const std::uint32_t operands = here + (x_lane ^ (s * 32));
#pragma unroll
            for (int i = 0; i < TokenTiles; i += 2) {
                const uint4 v = load_matrix_x4(operands + i * 8 * x_row_bytes);
                b[i][0] = v.x, b[i][1] = v.y, b[i + 1][0] = v.z, b[i + 1][1] = v.w;
            }
#pragma unroll
            for (int r = 0; r < warp_row_tiles; ++r) {
                std::uint32_t a[4];
                decode_slice<T>(words[r][s], scales[r], s, a);
#pragma unroll
                for (int i = 0; i < TokenTiles; ++i) T::mma(acc[r][i], a, b[i][0], b[i][1]);
            }
        }
        stage = stage + 1 == stages ? 0 : stage + 1;
    }

    const std::int64_t first_token_tile = first_token / 8;
    if (p.splits > 1) {
#pragma unroll
        for (int r = 0; r < warp_row_tiles; ++r) {
            const std::int64_t tile = first_tile + warp * warp_row_tiles + r;
            if (tile >= p.row_tiles) continue;
#pragma unroll
            for (int i = 0; i < TokenTiles; ++i)
                if (first_token_tile + i < p.token_tiles)
                    *(reinterpret_cast<float4*>(p.sums) +
                      ((split * p.row_tiles + tile) * p.token_tiles + first_token_tile + i) * 32 + lane) =
                        make_float4(acc[r][i][0], acc[r][i][1], acc[r][i][2], acc[r][i][3]);
        }
        return;
    }

    // y through shared memory: a token's outputs are contiguous.
    __syncthreads();
    std::uint32_t* const flags = reinterpret_cast<std::uint32_t*>(shared + S::tokens * S::y_pitch);
    for (int i = threadIdx.x; i < S::flag_words; i += Warps * 32) flags[i] = 0;
    __syncthreads();
    bool any = false;
#pragma unroll
    for (int r = 0; r < warp_row_tiles; ++r) {
        const int tile_in_block = warp * warp_row_tiles + r;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row_in_block = tile_in_block * unit_rows + lane / 4 + 8 * h;
            const std::int64_t row = first_tile * unit_rows + row_in_block;
            const bool row_valid = row < p.out.source.n;
            const float scale2 =
                row_valid && p.out.source.scale2_rows != nullptr ? p.out.source.scale2_rows[row] : p.out.source.scale2;
            const float bias = row_valid && p.out.source.bias != nullptr ? p.out.source.bias[row] : 0.0f;
            const bool bad_scale = scale2_out_of_range(scale2);
#pragma unroll
            for (int i = 0; i < TokenTiles; ++i)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int token = i * 8 + lane % 4 * 2 + j;
                    const float sum = acc[r][i][2 * h + j];
                    *reinterpret_cast<std::uint16_t*>(shared + token * S::y_pitch + row_in_block * 2) =
                        T::from_float(fmaf(sum, scale2 * weight_factor<T>, bias));
                    if ((suspicious<T>(sum, p.out.smallest) || bad_scale) && row_valid &&
                        first_token + token < p.out.m) {
                        atomicOr(flags + tile_in_block * ((S::tokens + 31) / 32) + token / 32, 1u << token % 32);
                        any = true;
                    }
                }
        }
    }
    any = __syncthreads_or(any);
    constexpr int lanes_a_token = S::rows / 8;  // 16 bytes each
    constexpr int tokens_at_once = Warps * 32 / lanes_a_token;
    const std::int64_t first_row = first_tile * unit_rows;
    for (int token = threadIdx.x / lanes_a_token; token < S::tokens && first_token + token < p.out.m;
         token += tokens_at_once) {
        const int part = threadIdx.x % lanes_a_token;
        std::uint16_t* const y = p.out.y + (first_token + token) * p.out.source.n + first_row;
        const std::uint8_t* const from = shared + token * S::y_pitch;
        if (p.vector_stores && first_row + part * 8 + 8 <= p.out.source.n) {
            *reinterpret_cast<uint4*>(y + part * 8) = *reinterpret_cast<const uint4*>(from + part * 16);
        } else if (!p.vector_stores) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = i * lanes_a_token + part;
                if (first_row + row < p.out.source.n) y[row] = *reinterpret_cast<const std::uint16_t*>(from + row * 2);
            }
        }
    }
    if (!any) return;
    __syncthreads();
    for (int tile = warp; tile < S::row_tiles; tile += Warps)
        for (int word = 0; word < (S::tokens + 31) / 32; ++word) {
            std::uint32_t bits = flags[tile * ((S::tokens + 31) / 32) + word];
            while (bits != 0) {
                const std::int64_t token = first_token + word * 32 + __ffs(static_cast<int>(bits)) - 1;
                bits &= bits - 1;
                std::uint16_t* const out = p.out.y + token * p.out.source.n + first_row + tile * unit_rows;
                repair_tile<T>(p.out.source, first_tile + tile, token, out, out + 8);
            }
        }
#endif
}

// A warp a fragment: the splits' sums in order.
template <class T>
__global__ void __launch_bounds__(reduce_warps * 32) reduce_kernel(const __grid_constant__ GeneralParameters p) {
#if __CUDA_ARCH__ >= 800
    launch_dependents();
    wait_for_previous_grid();
    const int lane = threadIdx.x % 32;
    const std::int64_t fragments = p.row_tiles * p.token_tiles;
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * reduce_warps + threadIdx.x / 32; i < fragments;
         i += static_cast<std::int64_t>(gridDim.x) * reduce_warps) {
        const float4* from = reinterpret_cast<const float4*>(p.sums) + i * 32 + lane;
        float sums[4] = {};
#pragma unroll 4
        for (int s = 0; s < p.splits; ++s, from += fragments * 32) add(sums, *from);
        const std::int64_t tile = i / p.token_tiles;
        const std::int64_t token_tile = i - tile * p.token_tiles;
        const unsigned repair = store_fragment<T>(p.out, sums, tile, token_tile, lane);
        repair_fragment<T>(p.out, repair, tile, token_tile);
    }
#endif
}

struct GeneralConfiguration {
    int warps;
    int token_tiles;
    int splits;
};
constexpr int max_splits = 8;
constexpr int least_units_a_split = 8;

std::int64_t ceil_divide(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

GeneralConfiguration configure_general(const GemmArguments& a) {
    GeneralConfiguration c{};
    // In a batch-invariant layer the split does not depend on M: it is chosen as for one block of tokens.
    c.token_tiles = a.m <= 16 ? 2 : a.m <= 32 ? 4 : 8;
    const std::int64_t token_blocks = ceil_divide(a.m, c.token_tiles * 8);
    c.warps = c.token_tiles == 8 && ceil_divide(a.n, 256) * token_blocks >= a.sm_count ? 8 : 4;
    const std::int64_t blocks =
        a.batch_invariant ? ceil_divide(a.n, 128) : ceil_divide(a.n, c.warps * 32) * token_blocks;
    const std::int64_t most = std::min<std::int64_t>(max_splits, prepacked::k_units(a.k) / least_units_a_split);
    c.splits = static_cast<int>(std::clamp<std::int64_t>(2 * a.sm_count / blocks, 1, std::max<std::int64_t>(most, 1)));
    return c;
}

std::size_t general_workspace(const GemmArguments& a, const GeneralConfiguration& c) {
    if (c.splits <= 1) return 0;
    return static_cast<std::size_t>(c.splits) * prepacked::row_tiles(a.n) * ceil_divide(a.m, 8) * fragment_floats *
           sizeof(float);
}

template <class T, int Warps, int TokenTiles>
cudaError_t launch_general(GeneralParameters p, const GemmArguments& a) {
    using S = Shape<Warps, TokenTiles>;
    constexpr auto kernel = general_kernel<T, Warps, TokenTiles>;
    if (const cudaError_t e = allow_shared_memory<kernel>(S::shared_bytes)) return e;
    p.row_tiles = prepacked::row_tiles(a.n);
    p.token_tiles = ceil_divide(a.m, 8);
    const std::int64_t row_blocks = ceil_divide(p.row_tiles, S::row_tiles);
    const std::int64_t token_blocks = ceil_divide(a.m, S::tokens);
    if (row_blocks * token_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
    p.row_blocks = static_cast<int>(row_blocks);
    p.token_blocks = static_cast<int>(token_blocks);
    p.raster = static_cast<int>(
        std::min<std::int64_t>(token_blocks, std::clamp<std::int64_t>(INT32_MAX / row_blocks, 1, most_raster_blocks)));
    p.vector_stores = a.n % 8 == 0 && reinterpret_cast<std::uintptr_t>(a.y) % 16 == 0;
    const bool overlap = a.programmatic_launch && a.kernel_arch >= 90;
    Launch launch(dim3(static_cast<unsigned>(row_blocks * token_blocks), static_cast<unsigned>(p.splits)),
                  dim3(Warps * 32), S::shared_bytes, a.stream);
    if (overlap) launch.overlap_previous();
    if (const cudaError_t e = launch.run(kernel, p)) return e;
    if (p.splits == 1) return cudaSuccess;
    const std::int64_t blocks = ceil_divide(p.row_tiles * p.token_tiles, reduce_warps);
    Launch reduce(dim3(static_cast<unsigned>(std::min<std::int64_t>(blocks, 8 * a.sm_count))), dim3(reduce_warps * 32),
                  0, a.stream);
    if (overlap) reduce.overlap_previous();
    return reduce.run(reduce_kernel<T>, p);
}

template <class T>
cudaError_t launch_general_type(const GeneralParameters& p, const GeneralConfiguration& c, const GemmArguments& a) {
    const auto is = [&](int warps, int token_tiles) { return c.warps == warps && c.token_tiles == token_tiles; };
    if (is(4, 2)) return launch_general<T, 4, 2>(p, a);
    if (is(4, 4)) return launch_general<T, 4, 4>(p, a);
    if (is(4, 8)) return launch_general<T, 4, 8>(p, a);
    if (is(8, 8)) return launch_general<T, 8, 8>(p, a);
    return cudaErrorInvalidConfiguration;
}

cudaError_t gemm_mma_general(const GemmArguments& a, const GeneralConfiguration& c) {
    GeneralParameters p{};
    p.out = gemm_output(a);
    p.k_units = static_cast<int>(prepacked::k_units(a.k));
    p.splits = c.splits;
    p.sums = static_cast<float*>(a.workspace);
    if (p.splits > 1 && p.sums == nullptr) return cudaErrorInvalidValue;
    return a.dtype == DType::float16 ? launch_general_type<Float16>(p, c, a) : launch_general_type<BFloat16>(p, c, a);
}

// A stream kernel for few tokens, by rows of W and K: the first of `clusters` that fits. Measured on one H200
// (docs/gemm_kernel_notes.md).
struct StreamChoice {
    int token_tiles;
    int row_tiles;  // 1: mma.sync, 4: wgmma
    int clusters[3];
};
constexpr int mma_sync = 1, wgmma = 4;
constexpr std::int64_t max_stream_m = 64;
constexpr int tiles_an_sm_without_cluster = 16;  // from so many row tiles an SM on, no cluster where x fits

cudaError_t gemm_mma_streaming(const GemmArguments& a, const GemmMmaTuning& t) {
    return t.row_tiles == wgmma ? gemm_wgmma_stream(a, t) : gemm_mma_stream(a, t);
}

StreamChoice choose_stream(const GemmArguments& a) {
    const std::int64_t tiles = prepacked::row_tiles(a.n);
    const std::int64_t k_units = prepacked::k_units(a.k);
    const bool small = tiles <= a.sm_count;
    const bool large = tiles >= std::int64_t{tiles_an_sm_without_cluster} * a.sm_count;
    if (!a.wgmma) {
        const int token_tiles = a.m <= 8 ? 1 : a.m <= 16 ? 2 : a.m <= 32 ? 4 : 0;
        if (a.kernel_arch < 90) return {token_tiles, mma_sync, {1}};
        return {token_tiles, mma_sync, {2, 4, 8}};
    }
    const bool wide_k = k_units >= 32;
    if (a.m <= 8) return {1, mma_sync, {k_units > 128 ? 8 : 2, 4}};
    if (a.m <= 16) {
        if (small) return {2, wgmma, {wide_k ? 4 : 2, 8}};
        if (large && k_units <= 32) return {2, wgmma, {1, 2}};
        return {2, wgmma, {2, 4, 8}};
    }
    const int token_tiles = a.m <= 24 ? 3 : a.m <= 32 ? 4 : a.m <= 48 ? 6 : 8;
    if (small) return {token_tiles, wgmma, {wide_k ? 8 : 2, 4}};
    if (large && token_tiles <= 4 && k_units <= 32) return {token_tiles, wgmma, {1, 2}};
    return {token_tiles, wgmma, {2, 4, 8}};
}

}  // namespace

bool gemm_mma_supports(const GemmArguments& a) {
    return a.kernel_arch >= 80 && a.n >= 1 && a.m >= 1 && prepacked::supports(a.k, prepacked::slice_k);
}

std::size_t gemm_mma_workspace(const GemmArguments& a) {
    return std::max(general_workspace(a, configure_general(a)), gemm_wgmma_stream_workspace(a));
}

cudaError_t gemm_mma(const GemmArguments& a, const GemmMmaTuning& t) {
    if (!gemm_mma_supports(a) || a.x_row_stride % 8 != 0 || reinterpret_cast<std::uintptr_t>(a.x) % 16 != 0)
        return cudaErrorInvalidValue;
    if (t.token_tiles != 0 && t.cluster > 0) return gemm_mma_streaming(a, t);
    if (t.token_tiles != 0) {
        const GeneralConfiguration c{t.warps, t.token_tiles, t.splits};
        if (general_workspace(a, c) > gemm_mma_workspace(a)) return cudaErrorInvalidConfiguration;
        return gemm_mma_general(a, c);
    }
    if (!a.batch_invariant && a.m <= max_stream_m) {
        const StreamChoice choice = choose_stream(a);
        for (const int cluster : choice.clusters) {
            if (cluster == 0 || choice.token_tiles == 0) break;
            GemmMmaTuning stream;
            stream.token_tiles = choice.token_tiles;
            stream.row_tiles = choice.row_tiles;
            stream.cluster = cluster;
            const cudaError_t e = gemm_mma_streaming(a, stream);
            if (e != cudaErrorInvalidConfiguration) return e;
        }
        if (gemm_wgmma_supports(a)) return cudaErrorInvalidConfiguration;  // whose tiles are faster than what follows
    }
    return gemm_mma_general(a, configure_general(a));
}

}  // namespace fp4linear::cuda
