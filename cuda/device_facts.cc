#include "cuda/device_facts.h"

#include <map>
#include <mutex>

#include "cuda/backend.h"
#include "cuda/check.h"
#include "cuda/gemm.h"
#include "cuda/kernels.h"
#include "cuda/memory.h"
#include "cuda/native_kernels.h"

namespace fp4linear::cuda {

const DeviceFacts& device_facts(int device) {
    // Never destroyed: a thread may still be inside a call when the process ends.
    static auto* all = new std::map<int, DeviceFacts>;
    static auto* mutex = new std::mutex;
    const std::lock_guard lock(*mutex);
    const auto found = all->find(device);
    if (found != all->end()) return found->second;
    const DeviceInfo info = device_info(device);
    DeviceFacts facts;
    facts.sm = info.sm;
    facts.sm_count = info.sm_count;
    const DeviceGuard guard(device);
    FP4LINEAR_CUDA_CHECK(
        cudaDeviceGetAttribute(&facts.max_shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    FP4LINEAR_CUDA_CHECK(gemv_tensor_core_kernel_arch(&facts.kernel_arch));
    FP4LINEAR_CUDA_CHECK(gemm_wgmma_compiled(&facts.wgmma));
    if (const NativeKernels* native = native_kernels(facts.sm)) facts.native = native->loads();
    return all->emplace(device, facts).first->second;
}

}  // namespace fp4linear::cuda
