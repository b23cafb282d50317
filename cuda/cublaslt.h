// The part of cuBLASLt that dequant_cublas calls, loaded at run time: the library is 500 MB, belongs to the user's
// framework or system, and a layer that never needs it must not ask for it.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "dtype.h"

namespace fp4linear::cuda::cublaslt {

bool available();  // tries to load the library until that succeeds: a framework imported later may bring it
std::string unavailable_reason();
void prepare_device();  // makes the handle of the current device, which no capture may contain

// d [m, n] (row stride ldd, of type out) = alpha * x [m, k] * w [n, k]^T, x and w of type in, sums in fp32. Row strides
// in elements.
struct Matmul {
    std::int64_t m = 0, n = 0, k = 0;
    DType in = DType::bfloat16, out = DType::bfloat16;
    const void* x = nullptr;
    std::int64_t ldx = 0;
    const void* w = nullptr;
    std::int64_t ldw = 0;
    void* d = nullptr;
    std::int64_t ldd = 0;
    float alpha = 1.0f;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;
    cudaStream_t stream = nullptr;
};
void matmul(const Matmul& arguments);  // throws std::runtime_error with the call and the status

}  // namespace fp4linear::cuda::cublaslt
