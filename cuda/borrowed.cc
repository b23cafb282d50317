// Calls on weights in somebody else's device memory: a DeviceWeight that owns nothing, made for the call.
#include "cuda/borrowed.h"

#include <array>
#include <atomic>

#include "cuda/aligned_rows.h"
#include "cuda/check.h"
#include "cuda/cublaslt.h"
#include "cuda/device_facts.h"
#include "cuda/device_weight.h"
#include "cuda/memory.h"

namespace fp4linear::cuda {
void run(PathId path, const BorrowedWeight& weight, const Problem& problem, const CallOptions& options, void* stream) {
    const DeviceWeight borrowed(weight, problem);
    Problem p = problem;
    // A slice of an array may start anywhere; rows of x are contiguous here, so the first decides for all.
    if (!starts_aligned(problem)) p.x = aligned_copy(problem, static_cast<cudaStream_t>(stream));
    run(path, borrowed, p, options, stream);
}

void fill_with_bias(const BorrowedWeight& weight, const Problem& problem, void* stream) {
    fill_with_bias(DeviceWeight(weight, problem), problem, stream);
}

void prepare_device(int device) {
    constexpr int most = 64;  // devices of a host whose preparation is remembered
    static std::array<std::atomic<bool>, most> prepared{};
    const bool remembered = device >= 0 && device < most;
    if (remembered && prepared[static_cast<std::size_t>(device)].load(std::memory_order_acquire)) return;
    // The first call may already be captured; what this allocates is no work of the stream.
    const RelaxedCapture relaxed;
    device_facts(device);
    if (cublaslt::available()) cublaslt::prepare_device();
    if (remembered) prepared[static_cast<std::size_t>(device)].store(true, std::memory_order_release);
}

}  // namespace fp4linear::cuda
