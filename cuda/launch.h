// What the kernels' launches have in common.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fp4linear::cuda {

// Lets a kernel's blocks take `bytes` of dynamic shared memory on the current device, always the same number there. The
// driver is asked once a kernel and device: the call costs as much as half a launch.
template <auto Kernel>
cudaError_t allow_shared_memory(int bytes) {
    constexpr int known_devices = 64;  // bits of the word; devices beyond ask every time
    static std::atomic<std::uint64_t> allowed{0};
    int device = 0;
    if (const cudaError_t e = cudaGetDevice(&device)) return e;
    const std::uint64_t bit = device < known_devices ? std::uint64_t{1} << device : 0;
    if ((allowed.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
    if (const cudaError_t e = cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
        return e;
    allowed.fetch_or(bit, std::memory_order_release);
    return cudaSuccess;
}

class Launch {
   public:
    Launch(dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream) {
        config_.gridDim = grid;
        config_.blockDim = block;
        config_.dynamicSmemBytes = shared_bytes;
        config_.stream = stream;
        config_.attrs = attributes_;
    }
    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    // SM90+: the grid may start while the one before it in the stream drains; the kernel waits where it must.
    void overlap_previous() {
        cudaLaunchAttribute& a = attributes_[config_.numAttrs++];
        a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        a.val.programmaticStreamSerializationAllowed = 1;
    }
    void cluster(int blocks) {
        cudaLaunchAttribute& a = attributes_[config_.numAttrs++];
        a.id = cudaLaunchAttributeClusterDimension;
        a.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    }
    template <class... Parameters, class... Arguments>
    cudaError_t run(void (*kernel)(Parameters...), Arguments&&... arguments) {
        return cudaLaunchKernelEx(&config_, kernel, static_cast<Arguments&&>(arguments)...);
    }

   private:
    cudaLaunchConfig_t config_{};
    cudaLaunchAttribute attributes_[2]{};
};

}  // namespace fp4linear::cuda
