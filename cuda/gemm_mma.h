// What gemm_mma is made of: the kernels for few tokens, whose x stays in shared memory. They return
// cudaErrorInvalidConfiguration where that does not fit.
#pragma once
#include <cuda_runtime.h>

#include <atomic>

#include "cuda/gemm.h"

namespace fp4linear::cuda {

// How many clusters of `ranks` (at most 8) blocks run at once: those of more than two do not use every SM, and a second
// wave would double the time. Asked once a kernel and device.
template <auto Kernel>
cudaError_t most_clusters(int ranks, int threads, const GemmArguments& a, int* most) {
    constexpr int known_devices = 64;  // those beyond ask every time
    static std::atomic<int> known[known_devices][9];
    int device = 0;
    if (const cudaError_t e = cudaGetDevice(&device)) return e;
    if (device < known_devices) {
        *most = known[device][ranks].load(std::memory_order_relaxed);
        if (*most > 0) return cudaSuccess;
    }
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(a.sm_count / ranks * ranks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<std::size_t>(a.max_shared_memory);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (const cudaError_t e = cudaOccupancyMaxActiveClusters(most, Kernel, &config)) return e;
    if (*most <= 0) return cudaErrorInvalidConfiguration;
    if (device < known_devices) known[device][ranks].store(*most, std::memory_order_relaxed);
    return cudaSuccess;
}

// gemm_mma_stream.cu: mma.sync, SM80+, up to 32 tokens; clusters of blocks along K from SM90 on.
cudaError_t gemm_mma_stream(const GemmArguments& arguments, const GemmMmaTuning& tuning);

// gemm_wgmma_stream.cu: wgmma, SM90, up to 64 tokens.
std::size_t gemm_wgmma_stream_workspace(const GemmArguments& arguments);
cudaError_t gemm_wgmma_stream(const GemmArguments& arguments, const GemmMmaTuning& tuning);

}  // namespace fp4linear::cuda
