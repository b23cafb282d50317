// Which kernel of gemm_fused serves a call. Measured on one H200 (docs/performance.md).
#include "cuda/gemm.h"

namespace fp4linear::cuda {
namespace {

constexpr std::int64_t most_x = 512 << 10;  // values of x that find room in a cluster of eight blocks

// Few tokens: the streaming kernels of gemm_mma are ahead of wgmma tiles.
bool streams(const GemmArguments& a) {
    const std::int64_t tokens = (a.m + 7) / 8 * 8;
    return (a.m <= 24 && a.k * tokens <= most_x) || (a.m <= 32 && a.k <= 4096);
}

}  // namespace

GemmKernel choose_gemm(const GemmArguments& a) {
    const bool wgmma = gemm_wgmma_supports(a);
    if (a.batch_invariant) return wgmma ? GemmKernel::wgmma : GemmKernel::mma;  // one order of sums for every M
    if (gemm_small_supports(a)) return GemmKernel::small;
    return wgmma && !streams(a) ? GemmKernel::wgmma : GemmKernel::mma;
}

}  // namespace fp4linear::cuda
