// Errors of the CUDA runtime as exceptions that carry the call and the error's name.
#pragma once
#include <cuda_runtime_api.h>

#include <new>
#include <stdexcept>
#include <string>

namespace fp4linear::cuda {

class Error : public std::runtime_error {
   public:
    Error(const char* call, const char* name, const char* description)
        : std::runtime_error(std::string(call) + " failed: " + name + " (" + description + ")") {}
};

// The device's memory has run out: Python's MemoryError, as it is for the host's.
class OutOfMemory : public std::bad_alloc {
   public:
    explicit OutOfMemory(const Error& error) : error_(error) {}
    [[nodiscard]] const char* what() const noexcept override { return error_.what(); }

   private:
    Error error_;
};

inline void check(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // forgets the error, so that the next call does not report it again
    const Error error(call, cudaGetErrorName(status), cudaGetErrorString(status));
    if (status == cudaErrorMemoryAllocation) throw OutOfMemory(error);
    throw error;
}

}  // namespace fp4linear::cuda

#define FP4LINEAR_CUDA_CHECK(call) ::fp4linear::cuda::check((call), #call)
