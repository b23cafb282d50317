// Errors of the CUDA runtime as exceptions that carry the call and the error's name.
#pragma once
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fp4linear::cuda {

class Error : public std::runtime_error {
   public:
    Error(const char* call, const char* name, const char* description)
        : std::runtime_error(std::string(call) + " failed: " + name + " (" + description + ")") {}
};

inline void check(cudaError_t status, const char* call) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // forgets the error, so that the next call does not report it again
    throw Error(call, cudaGetErrorName(status), cudaGetErrorString(status));
}

}  // namespace fp4linear::cuda

#define FP4LINEAR_CUDA_CHECK(call) ::fp4linear::cuda::check((call), #call)
