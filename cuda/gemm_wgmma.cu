// gemm_fused on SM90: the launch of the tiles' kernels. The kernel is in device/gemm_wgmma.cuh, which tiles a call
// takes in gemm_wgmma_choice.h.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#pragma nv_diag_suppress 177  // nothing uses the helpers of a kernel without a body
#endif

#include "cuda/device/gemm_wgmma.cuh"
#include "cuda/gemm.h"
#include "cuda/gemm_wgmma_choice.h"
#include "cuda/launch.h"
#include "cuda/prepacked.h"

namespace fp4linear::cuda {
namespace {

using namespace device;
using namespace device::gemm_wgmma;
using namespace wgmma_choice;

constexpr int flag_bytes = gemm_wgmma_flag_bytes;  // a word for every warp that can share a tile

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
          bool Paired>
cudaError_t launch(const GemmArguments& a, const Configuration& c) {
    constexpr auto kernel = gemm_kernel<T, Tokens, Groups, StageUnits, Sets, Slices, MinBlocks, Clustered, Paired>;
    constexpr int warps = Groups * group_warps;
    const Dealt dealt = deal_out({a.m, a.n, a.k, a.sm_count, a.batch_invariant}, c);
    const int shared = shared_bytes(Tokens, Groups, StageUnits, c.stages, c.splits);
    if (dealt.blocks == 0 || shared == 0 || shared > a.max_shared_memory) return cudaErrorInvalidConfiguration;
    WgmmaParameters p{};
    static_cast<Schedule&>(p) = dealt.schedule;
    p.source = {a.prepacked, static_cast<const std::uint16_t*>(a.x), a.x_row_stride, a.n, a.k, a.scale2_rows, a.bias,
                a.scale2};
    p.y = static_cast<std::uint16_t*>(a.y);
    p.m = a.m;
    p.smallest = smallest_sum<T>(a.k, a.largest_scale2);
    p.row_tiles = static_cast<int>(prepacked::row_tiles(a.n));
    p.block_tokens = dealt.block_tokens;
    p.splits = c.splits;
    p.stages = c.stages;
    p.vector_stores = a.n % 8 == 0 && reinterpret_cast<std::uintptr_t>(a.y) % 16 == 0;
    if constexpr (!Clustered) {
        p.flags = static_cast<std::uint32_t*>(a.workspace);
        p.partials = reinterpret_cast<float4*>(static_cast<std::uint8_t*>(a.workspace) + flag_bytes);
        if (p.shared_tiles > 0) {
            if (a.workspace == nullptr) return cudaErrorInvalidValue;
            if (dealt.blocks * warps * 4 > flag_bytes) return cudaErrorInvalidConfiguration;
        }
    }
    if (const cudaError_t e = allow_shared_memory<kernel>(a.max_shared_memory)) return e;
    CUtensorMap x_map;
    if (const cudaError_t e = make_x_map(a, p.block_tokens / (Paired ? 2 : 1), &x_map)) return e;

    Launch launch(dim3(static_cast<unsigned>(dealt.blocks)), dim3(threads_of(Tokens, Groups)),
                  static_cast<std::size_t>(shared), a.stream);
    if (a.programmatic_launch) launch.overlap_previous();
    if constexpr (Clustered) launch.cluster(c.splits);
    if constexpr (Paired) launch.cluster(2);
    return launch.run(kernel, x_map, p);
}

template <class T>
cudaError_t launch_configured(const GemmArguments& a, const Configuration& c) {
#define FP4LINEAR_LAUNCH(clustered, is_paired, tokens_, groups_, units, sets, slices, blocks)                  \
    if (c.tokens == tokens_ && c.groups == groups_ && c.stage_units == units && (c.splits > 1) == clustered && \
        c.paired == is_paired)                                                                                 \
        return launch<T, tokens_, groups_, units, sets, slices, blocks, clustered, is_paired>(a, c);
    FP4LINEAR_WGMMA_KERNELS(FP4LINEAR_LAUNCH)
#undef FP4LINEAR_LAUNCH
    return cudaErrorInvalidConfiguration;
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
    // Parts that blocks leave to others are no more than the blocks that stay: 128 x 256 sums an SM are the most.
    return flag_bytes + static_cast<std::size_t>(a.sm_count) * 128 * 256 * sizeof(float);
}

cudaError_t gemm_wgmma(const GemmArguments& a, const GemmWgmmaTuning& tuning) {
    if (a.m == 0 || a.n == 0) return cudaSuccess;
    if (!gemm_wgmma_supports(a)) return cudaErrorNotSupported;
    if (reinterpret_cast<std::uintptr_t>(a.x) % 16 != 0 || a.x_row_stride % 8 != 0) return cudaErrorInvalidValue;
    Configuration c = choose({a.m, a.n, a.k, a.sm_count, a.batch_invariant});
    if (tuning.tokens != 0)
        c = {tuning.tokens,
             tuning.groups,
             tuning.stage_units,
             tuning.stages,
             std::max(tuning.splits, 1),
             tuning.blocks_an_sm,
             tuning.raster,
             tuning.least_units,
             tuning.sharing % 2 != 0,
             tuning.sharing / 2 % 2 != 0,
             tuning.splits < 0,
             tuning.sharing >= 4 ? tuning.least_units : -1};
    return a.dtype == DType::float16 ? launch_configured<Float16>(a, c) : launch_configured<BFloat16>(a, c);
}

}  // namespace fp4linear::cuda
