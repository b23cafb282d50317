// Small kernels around the paths: strided copies and the answer for K = 0. Bound by their launch.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/device_weight.h"

namespace fp4linear::cuda {
namespace {

constexpr int threads = 256;
constexpr int max_axes = 8;

struct Axes {
    int count = 0;
    std::int64_t shape[max_axes] = {};
    std::int64_t strides[max_axes] = {};  // bytes
};

unsigned blocks_for(std::int64_t elements) {
    return static_cast<unsigned>(std::clamp<std::int64_t>((elements + threads - 1) / threads, 1, 1 << 20));
}

// Bytes, not halves: a source may be misaligned.
__global__ void gather_kernel(std::uint16_t* to, const unsigned char* from, std::int64_t elements, Axes axes) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
        std::int64_t rest = i, offset = 0;
        for (int axis = axes.count - 1; axis >= 0; --axis) {
            offset += rest % axes.shape[axis] * axes.strides[axis];
            rest /= axes.shape[axis];
        }
        to[i] = static_cast<std::uint16_t>(from[offset] | from[offset + 1] << 8);
    }
}

template <class T>
__global__ void fill_kernel(T* y, const float* bias, std::int64_t elements, std::int64_t n) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elements; i += step) {
        const float value = bias != nullptr ? bias[i % n] : 0.0f;
        if constexpr (std::is_same_v<T, __half>)
            y[i] = __float2half_rn(value);
        else
            y[i] = __float2bfloat16_rn(value);
    }
}

}  // namespace

void gather(void* to, const void* from, int ndim, const std::int64_t* shape, const std::int64_t* strides,
            void* stream) {
    Axes axes;
    axes.count = ndim;
    std::int64_t elements = 1;
    for (int i = 0; i < ndim; ++i) {
        axes.shape[i] = shape[i];
        axes.strides[i] = strides[i];
        elements *= shape[i];
    }
    if (elements == 0) return;
    gather_kernel<<<blocks_for(elements), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<std::uint16_t*>(to), static_cast<const unsigned char*>(from), elements, axes);
    FP4LINEAR_CUDA_CHECK(cudaGetLastError());
}

void fill_with_bias(const Weight& weight, const Problem& p, void* stream) {
    const float* bias = static_cast<const DeviceWeight&>(weight).bias();
    const std::int64_t elements = p.m * p.n;
    const auto s = static_cast<cudaStream_t>(stream);
    if (p.dtype == DType::float16) {
        fill_kernel<<<blocks_for(elements), threads, 0, s>>>(static_cast<__half*>(p.y), bias, elements, p.n);
    } else {
        fill_kernel<<<blocks_for(elements), threads, 0, s>>>(static_cast<__nv_bfloat16*>(p.y), bias, elements, p.n);
    }
    FP4LINEAR_CUDA_CHECK(cudaGetLastError());
}

}  // namespace fp4linear::cuda
