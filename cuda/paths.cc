// The GPU rungs of the ladder: what a device offers the planner, and the launch of the path that it chose.
#include <algorithm>
#include <stdexcept>

#include "cuda/backend.h"
#include "cuda/check.h"
#include "cuda/cublaslt.h"
#include "cuda/dequant_cublas.h"
#include "cuda/device_facts.h"
#include "cuda/device_weight.h"
#include "cuda/gemm_fused.h"
#include "cuda/kernels.h"
#include "cuda/native_emulated.h"
#include "cuda/native_kernels.h"
#include "cuda/native_nvfp4.h"
#include "cuda/prepacked.h"
#include "cuda/weight.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {
namespace {

// The paths that need the tensor cores of SM80, and the prepacked weight.
constexpr std::uint32_t tensor_core_kernels = path_bit(PathId::gemv_tensor_core) | path_bit(PathId::gemm_fused);
constexpr std::uint32_t kernels_of_build = tensor_core_kernels | path_bit(PathId::gemv_scalar) |
                                           path_bit(PathId::native_emulated) | path_bit(PathId::dequant_cublas);

constexpr int tensor_core_sm = 80;  // the first with bf16 mma.m16n8k16

GemvArguments gemv_arguments(const DeviceWeight& w, const Problem& p, void* partials, void* stream) {
    return {.n = p.n,
            .k = p.k,
            .m = p.m,
            .dtype = p.dtype,
            .x = p.x,
            .x_row_stride = p.x_row_stride,
            .y = p.y,
            .prepacked = w.prepacked(),
            .b = w.b(),
            .scales = w.scales(),
            .scale2 = w.scale2,
            .scale2_rows = w.scale2_rows(),
            .bias = w.bias(),
            .sm_count = w.facts.sm_count,
            .max_shared_memory = w.facts.max_shared_memory,
            .kernel_arch = w.facts.kernel_arch,
            .programmatic_launch = true,
            .workspace = partials,
            .stream = static_cast<cudaStream_t>(stream)};
}

}  // namespace

WeightForm choose_form(std::int64_t k, int block_size, bool has_nan_scales, const DeviceSpec& device,
                       const Options& options) {
    const bool can_run = (device.kernels & path_bit(PathId::gemv_tensor_core)) != 0;
    const bool wanted = can_run && options.gemv_tensor_core && options.path != "gemv_scalar";
    return wanted && !has_nan_scales && prepacked::supports(k, block_size) ? WeightForm::prepacked
                                                                           : WeightForm::canonical;
}

bool wants_native(std::int64_t n, std::int64_t k, int block_size, const DeviceSpec& device, const Options& options) {
    const std::string_view name = name_of(PathId::native_nvfp4);
    const bool by_ladder = options.path == "auto" && options.native_nvfp4 && !options.batch_invariant;
    if (!by_ladder && options.path != name) return false;
    const PlanQuery query{.m = 1, .n = n, .k = k, .block_size = block_size, .dtype = DType::bfloat16};
    return n > 0 && k > 0 && find_path(name)->can_run(query, device, options).empty();
}

DeviceSpec device_spec(int device) {
    const DeviceFacts& facts = device_facts(device);
    DeviceSpec spec;
    spec.kind = DeviceKind::cuda;
    spec.index = device;
    spec.sm = facts.sm;
    spec.sm_count = facts.sm_count;
    spec.kernels = kernels_of_build;
    // On a newer GPU the kernels may be those of an old architecture's PTX, which has no body of this one.
    if (facts.kernel_arch < tensor_core_sm) spec.kernels &= ~tensor_core_kernels;
    if (facts.native) spec.kernels |= path_bit(PathId::native_nvfp4);
    spec.native_reason = why_no_native_kernels(facts.sm);
    spec.cublaslt = cublaslt::available();
    if (!spec.cublaslt) spec.cublaslt_reason = cublaslt::unavailable_reason();
    return spec;
}
bool cublaslt_available() { return cublaslt::available(); }

namespace {

void run_gemv_tensor_core(const DeviceWeight& w, const Problem& p, cudaStream_t stream) {
    if (gemv_deep(w, p, stream)) return;
    void* partials = w.gemv_scratch == 0 ? nullptr : scratch(Scratch::gemv_partials, w.gemv_scratch, stream);
    FP4LINEAR_CUDA_CHECK(gemv_tensor_core(gemv_arguments(w, p, partials, stream)));
}

// More rows than the kernel takes come only where the result may not depend on M: 8 at a time.
void run_gemv_scalar(const DeviceWeight& w, const Problem& p, int rows_per_block, cudaStream_t stream) {
    for (std::int64_t first = 0; first < p.m; first += gemv_scalar_max_m) {
        Problem rows = p;
        rows.m = std::min(gemv_scalar_max_m, p.m - first);
        rows.x = static_cast<const char*>(p.x) + first * p.x_row_stride * 2;
        rows.y = static_cast<char*>(p.y) + first * p.n * 2;
        FP4LINEAR_CUDA_CHECK(gemv_scalar(gemv_arguments(w, rows, nullptr, stream), rows_per_block));
    }
}

}  // namespace

void run(PathId path, const Weight& weight, const Problem& problem, const CallOptions& options, void* stream) {
    const auto& w = static_cast<const DeviceWeight&>(weight);
    const auto s = static_cast<cudaStream_t>(stream);
    switch (path) {
        case PathId::gemv_tensor_core: run_gemv_tensor_core(w, problem, s); return;
        case PathId::gemv_scalar: run_gemv_scalar(w, problem, options.rows_per_block, s); return;
        case PathId::gemm_fused: gemm_fused(w, problem, options.batch_invariant, s); return;
        case PathId::native_nvfp4: native_nvfp4(w, problem, options.input_global_scale, s); return;
        case PathId::native_emulated: native_emulated(w, problem, options.input_global_scale, s); return;
        case PathId::dequant_cublas: dequant_cublas(w, problem, s); return;
        default: throw std::runtime_error("no CUDA kernel of " + std::string(name_of(path)));
    }
}

}  // namespace fp4linear::cuda
