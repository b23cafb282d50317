#include "cuda/gemm_fused.h"

#include "cuda/aligned_rows.h"
#include "cuda/check.h"
#include "cuda/gemm.h"
#include "cuda/prepacked.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {
namespace {

// Do rows of x start at multiples of 16 bytes, one behind the other?
bool is_aligned(const Problem& p) {
    constexpr std::int64_t elements = row_alignment / 2;
    return starts_aligned(p) && (p.m == 1 || (p.x_row_stride % elements == 0 && p.x_row_stride >= p.k));
}

// x where it is, or a copy that is aligned. K is a multiple of 64.
void align_x(const Problem& p, GemmArguments& a, cudaStream_t stream) {
    const bool in_place = is_aligned(p);
    a.x = in_place ? p.x : aligned_copy(p, stream);
    a.x_row_stride = in_place && p.m > 1 ? p.x_row_stride : p.k;
}

void* workspace(Scratch purpose, std::size_t bytes, cudaStream_t stream) {
    return bytes == 0 ? nullptr : scratch(purpose, bytes, stream);
}

// All but the workspace.
GemmArguments arguments(const DeviceWeight& w, const Problem& p, bool batch_invariant, cudaStream_t stream) {
    GemmArguments a;
    a.n = p.n;
    a.k = p.k;
    a.m = p.m;
    a.dtype = p.dtype;
    align_x(p, a, stream);
    a.y = p.y;
    a.prepacked = w.prepacked();
    a.scale2 = w.scale2;
    a.scale2_rows = w.scale2_rows();
    a.largest_scale2 = w.largest_scale2;
    a.bias = w.bias();
    a.sm_count = w.facts.sm_count;
    a.max_shared_memory = w.facts.max_shared_memory;
    a.kernel_arch = w.facts.kernel_arch;
    a.wgmma = w.facts.wgmma;
    a.batch_invariant = batch_invariant;
    a.stream = stream;
    return a;
}

// False: the call is gemm_wgmma's (large N or K, where x or the sums of the streaming kernels find no room).
bool run_mma(GemmArguments a) {
    a.workspace = workspace(Scratch::mma_partials, gemm_mma_workspace(a), a.stream);
    const cudaError_t e = gemm_mma(a);
    if (e == cudaErrorInvalidConfiguration && gemm_wgmma_supports(a)) return false;
    FP4LINEAR_CUDA_CHECK(e);
    return true;
}

void run_wgmma(GemmArguments a) {
    a.workspace = workspace(Scratch::wgmma_partials, gemm_wgmma_workspace(a), a.stream);
    FP4LINEAR_CUDA_CHECK(gemm_wgmma(a));
}

}  // namespace

void gemm_fused(const DeviceWeight& w, const Problem& p, bool batch_invariant, cudaStream_t stream) {
    const GemmArguments a = arguments(w, p, batch_invariant, stream);
    switch (choose_gemm(a)) {
        case GemmKernel::small: FP4LINEAR_CUDA_CHECK(gemm_small(a)); return;
        case GemmKernel::mma:
            if (!run_mma(a)) run_wgmma(a);
            return;
        case GemmKernel::wgmma: run_wgmma(a); return;
    }
}

bool gemv_deep(const DeviceWeight& w, const Problem& p, cudaStream_t stream) {
    // Measured on one H200: 18.4 us against 20.9 at 5120x17408, M = 8.
    constexpr std::int64_t deep_k = 8192;
    const bool wanted =
        w.facts.wgmma && p.m > 1 && p.k > deep_k && prepacked::row_tiles(p.n) >= w.facts.sm_count && is_aligned(p);
    return wanted && run_mma(arguments(w, p, false, stream));
}

}  // namespace fp4linear::cuda
