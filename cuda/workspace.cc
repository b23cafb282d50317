#include "cuda/workspace.h"

#include <bit>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>

#include "cuda/check.h"
#include "cuda/memory.h"

namespace fp4linear::cuda {
namespace {

struct Block {
    int device = 0;
    Scratch purpose = Scratch::cublas;
    std::size_t bytes = 0;
    void* memory = nullptr;
};

// Who may use a block: a stream (the per-thread default stream of a thread has the same handle in every thread), or a
// stream of a capture.
using Owner = std::tuple<int, cudaStream_t, std::thread::id, unsigned long long, Scratch>;

struct Pool {
    std::mutex mutex;
    std::map<Owner, Block> blocks;
    std::vector<Block> returned;  // by graphs that are gone
};

Pool& pool() {
    static auto* instance = new Pool;  // outlives every graph
    return *instance;
}

struct GraphBlock {
    Owner owner;
    Block block;
};

// Called by the runtime when a graph and all that was instantiated from it are gone. It may call no CUDA function.
void give_back(void* opaque) {
    auto* held = static_cast<GraphBlock*>(opaque);
    {
        const std::lock_guard lock(pool().mutex);
        pool().blocks.erase(held->owner);
        pool().returned.push_back(held->block);
    }
    delete held;
}

// Zeros, whatever is being captured.
void clear(void* memory, std::size_t bytes) {
    cudaStream_t stream = nullptr;
    FP4LINEAR_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const cudaError_t set = cudaMemsetAsync(memory, 0, bytes, stream);
    const cudaError_t done = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    FP4LINEAR_CUDA_CHECK(set);
    FP4LINEAR_CUDA_CHECK(done);
}

// Of `bytes`, or of what is `needed` where these are not to be had.
Block obtain(int device, Scratch purpose, std::size_t needed, std::size_t bytes, bool reuse) {
    auto& returned = pool().returned;
    for (std::size_t i = 0; reuse && i < returned.size(); ++i) {
        if (returned[i].device != device || returned[i].purpose != purpose || returned[i].bytes < bytes) continue;
        const Block block = returned[i];
        returned.erase(returned.begin() + static_cast<std::ptrdiff_t>(i));
        return block;
    }
    Block block{device, purpose, bytes, nullptr};
    const RelaxedCapture relaxed;
    cudaError_t made = cudaMalloc(&block.memory, bytes);
    if (made == cudaErrorMemoryAllocation && needed < bytes) {
        cudaGetLastError();  // what is needed may still be there
        block.bytes = bytes = needed;
        made = cudaMalloc(&block.memory, bytes);
    }
    FP4LINEAR_CUDA_CHECK(made);
    if (purpose != Scratch::wgmma_partials) return block;
    try {
        clear(block.memory, bytes);
    } catch (...) {
        cudaFree(block.memory);
        throw;
    }
    return block;
}

}  // namespace

void* scratch(Scratch purpose, std::size_t bytes, cudaStream_t stream) {
    int device = 0;
    FP4LINEAR_CUDA_CHECK(cudaGetDevice(&device));
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    cudaGraph_t graph = nullptr;
    FP4LINEAR_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &capture, &graph, nullptr, nullptr, nullptr));
    const bool capturing = status == cudaStreamCaptureStatusActive;
    const std::thread::id thread = stream == cudaStreamPerThread ? std::this_thread::get_id() : std::thread::id();
    const Owner owner{device, stream, thread, capturing ? capture : 0, purpose};

    const std::lock_guard lock(pool().mutex);
    const auto found = pool().blocks.find(owner);
    if (found != pool().blocks.end() && found->second.bytes >= bytes) return found->second.memory;
    // A block that proves too small is left to the work that was put on the stream before. The next one is a power of
    // two, so that all that a stream leaves is less than what it holds, however slowly its calls grow.
    const bool grows = found != pool().blocks.end() && !capturing;
    const Block block = obtain(device, purpose, bytes, grows ? std::bit_ceil(bytes) : bytes, capturing);
    pool().blocks[owner] = block;
    if (capturing) {
        cudaUserObject_t object = nullptr;
        FP4LINEAR_CUDA_CHECK(
            cudaUserObjectCreate(&object, new GraphBlock{owner, block}, give_back, 1, cudaUserObjectNoDestructorSync));
        FP4LINEAR_CUDA_CHECK(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
    }
    return block.memory;
}

}  // namespace fp4linear::cuda
