#include "cuda/native_kernels.h"

#include "cuda/backend.h"

namespace fp4linear::cuda {
namespace {

// FP4LINEAR_NATIVE_SM120 and _SM100: the build has the family's file. FP4LINEAR_CUTLASS: it found CUTLASS.
constexpr const char* why_none =
#ifdef FP4LINEAR_CUTLASS
    "this build is not for it";
#else
    "this build was made without CUTLASS";
#endif

}  // namespace

const NativeKernels* native_kernels(int sm) {
#ifdef FP4LINEAR_NATIVE_SM120
    static const NativeKernels sm120 = native_kernels_sm120();
    if (sm / 10 == 12) return &sm120;
#endif
#ifdef FP4LINEAR_NATIVE_SM100
    static const NativeKernels sm100 = native_kernels_sm100();
    if (sm / 10 == 10) return &sm100;
#endif
    static_cast<void>(sm);
    return nullptr;
}

const char* why_no_native_kernels(int sm) { return native_kernels(sm) != nullptr ? "" : why_none; }

NativeCheck check_native(int sm, std::int64_t m, std::int64_t n, std::int64_t k, DType dtype) {
    NativeCheck check;
    const NativeKernels* const kernels = native_kernels(sm);
    if (kernels == nullptr) {
        check.reason = why_no_native_kernels(sm);
        return check;
    }
    const NativeArguments arguments{.m = m, .n = n, .k = k, .dtype = dtype, .sm_count = 148};  // of a B200: no matter
    const NativeTile tile = kernels->tile(m);
    check.built = true;
    check.tile_m = tile.m;
    check.tile_n = tile.n;
    check.tile_k = tile.k;
    check.cluster_m = tile.cluster_m;
    const char* const why = kernels->cannot(arguments);
    check.reason = why != nullptr ? why : "";
    check.workspace = kernels->workspace(arguments);
    return check;
}

}  // namespace fp4linear::cuda
