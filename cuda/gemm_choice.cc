// Which kernel of gemm_fused serves a call. Measured on one H200 (docs/performance.md).
#include "cuda/gemm.h"

namespace fp4linear::cuda {
namespace {

// Few tokens, whose x fits in the shared memory of a block or two: the streaming kernels of gemm_mma are ahead of wgmma
// tiles.
bool streams(const GemmArguments& a) { return (a.m <= 16 && a.k <= 5120) || (a.m <= 32 && a.k <= 4096); }

}  // namespace

GemmKernel choose_gemm(const GemmArguments& a) {
    const bool wgmma = gemm_wgmma_supports(a);
    if (a.batch_invariant) return wgmma ? GemmKernel::wgmma : GemmKernel::mma;  // one order of sums for every M
    if (gemm_small_supports(a)) return GemmKernel::small;
    return wgmma && !streams(a) ? GemmKernel::wgmma : GemmKernel::mma;
}

}  // namespace fp4linear::cuda
