// Devices, streams and order between streams.
#include <mutex>
#include <unordered_map>

#include "cuda/check.h"
#include "cuda/weight.h"

namespace fp4linear::cuda {
namespace {

struct Events {
    std::unordered_map<int, cudaEvent_t> of_device;
    ~Events() {
        for (const auto& [device, event] : of_device) cudaEventDestroy(event);
    }
};

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

int current_device() {
    int device = 0;
    FP4LINEAR_CUDA_CHECK(cudaGetDevice(&device));
    return device;
}

CurrentDevice::CurrentDevice(int device) {
    const int now = current_device();
    if (now == device) return;
    FP4LINEAR_CUDA_CHECK(cudaSetDevice(device));
    previous_ = now;
}

CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

void* own_stream(int device) {
    static auto* streams = new std::unordered_map<int, cudaStream_t>;
    static auto* mutex = new std::mutex;
    const std::lock_guard lock(*mutex);
    cudaStream_t& stream = (*streams)[device];
    if (stream == nullptr) {
        const CurrentDevice current(device);
        FP4LINEAR_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    return stream;
}

void order(void* earlier, void* later) {
    if (earlier == later) return;
    // An event may be recorded anew as soon as a wait on it is enqueued, so one a thread and device serves every call.
    thread_local Events events;
    cudaEvent_t& event = events.of_device[current_device()];
    if (event == nullptr) FP4LINEAR_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    FP4LINEAR_CUDA_CHECK(cudaEventRecord(event, as_stream(earlier)));
    FP4LINEAR_CUDA_CHECK(cudaStreamWaitEvent(as_stream(later), event, 0));
}

void* allocate(std::size_t bytes, void* stream) {
    void* memory = nullptr;
    if (bytes != 0) FP4LINEAR_CUDA_CHECK(cudaMallocAsync(&memory, bytes, as_stream(stream)));
    return memory;
}

void release(void* memory, void* stream) noexcept {
    if (memory != nullptr) cudaFreeAsync(memory, as_stream(stream));
}

void call_when_reached(void* stream, void (*function)(void*), void* argument) {
    FP4LINEAR_CUDA_CHECK(cudaLaunchHostFunc(as_stream(stream), function, argument));
}

void copy(void* to, const void* from, std::size_t bytes) {
    if (bytes != 0) FP4LINEAR_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
}

}  // namespace fp4linear::cuda
