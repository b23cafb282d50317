// Owners of a device allocation and of the calling thread's current device.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/check.h"

namespace fp4linear::cuda {

// Makes a device current and puts the caller's back.
class DeviceGuard {
   public:
    explicit DeviceGuard(int device) {
        FP4LINEAR_CUDA_CHECK(cudaGetDevice(&previous_));
        FP4LINEAR_CUDA_CHECK(cudaSetDevice(device));
    }
    ~DeviceGuard() { cudaSetDevice(previous_); }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

   private:
    int previous_ = 0;
};

// cudaMalloc and cudaFree are no stream work, so they may happen while this thread captures; the relaxed mode says that
// we know. Without it a layer made or freed during a capture would invalidate it.
class RelaxedCapture {
   public:
    RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    RelaxedCapture(const RelaxedCapture&) = delete;
    RelaxedCapture& operator=(const RelaxedCapture&) = delete;

   private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// An allocation on the current device; no bytes give a null pointer.
class DeviceBuffer {
   public:
    explicit DeviceBuffer(std::size_t bytes) {
        const RelaxedCapture relaxed;
        if (bytes != 0) FP4LINEAR_CUDA_CHECK(cudaMalloc(&data_, bytes));
    }
    DeviceBuffer(std::size_t bytes, const void* host) : DeviceBuffer(bytes) {
        if (bytes != 0) FP4LINEAR_CUDA_CHECK(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
    }
    ~DeviceBuffer() {
        if (!owned_ || data_ == nullptr) return;
        const RelaxedCapture relaxed;
        cudaFree(data_);
    }
    // Memory that somebody else keeps, and frees.
    static DeviceBuffer borrow(const void* data) { return DeviceBuffer(data, Borrowed()); }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    [[nodiscard]] void* get() const { return data_; }

   private:
    struct Borrowed {};
    DeviceBuffer(const void* data, Borrowed /*tag*/) : data_(const_cast<void*>(data)), owned_(false) {}

    void* data_ = nullptr;
    bool owned_ = true;
};

}  // namespace fp4linear::cuda
