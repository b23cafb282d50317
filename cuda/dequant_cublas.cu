// A chunk of rows of W becomes 16-bit e2m1 * e4m3 (exact) in scratch, cuBLAS multiplies it, and the next chunk reuses
// the scratch in stream order. One rounding: where alpha can hold scale2 and there is no bias, cuBLAS writes y;
// otherwise it leaves fp32 sums and the kernel below makes y of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "cuda/check.h"
#include "cuda/cublaslt.h"
#include "cuda/dequant_cublas.h"
#include "cuda/dequantize_rows.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {
namespace {

constexpr int epilogue_threads = 256;

// One chunk of the dequantised weight and, where sums are needed, of those. 64 MiB is the bound that the product
// promises; at K = 4096 it holds 8192 rows, which is enough tiles to fill any GPU.
constexpr std::size_t scratch_bytes = std::size_t{64} << 20;
// What cuBLAS documents as its workspace on Hopper; a smaller one costs it its split-K kernels.
constexpr std::size_t cublas_bytes = std::size_t{32} << 20;

template <class T>
__device__ T round_to(float value) {
    if constexpr (std::is_same_v<T, __half>)
        return __float2half_rn(value);
    else
        return __float2bfloat16_rn(value);
}

// sums [m, n] fp32, C-contiguous; y [m, n] with its own row stride. Blocks walk rows, threads columns: N and M
// unbounded.
template <class T>
__global__ void scale_and_round(const float* __restrict__ sums, std::int64_t m, std::int64_t n, float scale2,
                                const float* __restrict__ scale2_rows, const float* __restrict__ bias,
                                T* __restrict__ y, std::int64_t y_row_stride) {
    for (std::int64_t row = blockIdx.y; row < m; row += gridDim.y) {
        for (std::int64_t column = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; column < n;
             column += std::int64_t{gridDim.x} * blockDim.x) {
            const float factor = scale2_rows != nullptr ? scale2_rows[column] : scale2;
            const float shift = bias != nullptr ? bias[column] : 0.0f;
            y[row * y_row_stride + column] = round_to<T>(fmaf(sums[row * n + column], factor, shift));
        }
    }
}

template <class T>
void launch_scale_and_round(const float* sums, std::int64_t m, std::int64_t n, float scale2, const float* scale2_rows,
                            const float* bias, void* y, std::int64_t y_row_stride, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>((n + epilogue_threads - 1) / epilogue_threads, 65535)),
                    static_cast<unsigned>(std::min<std::int64_t>(m, 65535)));
    scale_and_round<T><<<grid, epilogue_threads, 0, stream>>>(sums, m, n, scale2, scale2_rows, bias, static_cast<T*>(y),
                                                              y_row_stride);
    FP4LINEAR_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void dequant_cublas(const DeviceWeight& w, const Problem& p, cudaStream_t stream) {
    // What cuBLAS's own epilogue may not be given: a bias, which some of its kernels add to a sum already rounded (seen
    // with bf16 on cuBLAS 13 and an H200: -27.75 for -27.6); alpha = 0, for which it reads nothing and loses a NaN; a
    // subnormal alpha, which it flushes; and a factor a row.
    const bool direct = !w.per_row && w.bias() == nullptr && std::isnormal(w.scale2);
    const std::size_t weight_bytes = direct ? scratch_bytes : scratch_bytes / 2;
    const std::int64_t row_bytes = p.k * 2;
    constexpr std::int64_t row_step = 128;  // whole tiles of cuBLAS, and whole units of the prepacked weight
    std::int64_t rows = static_cast<std::int64_t>(weight_bytes) / row_bytes;
    if (rows >= row_step) rows -= rows % row_step;
    if (rows < 16)
        throw std::runtime_error("dequant_cublas: K = " + std::to_string(p.k) + " does not fit into the scratch");
    // No more than the layer fills, so that small layers leave small scratch behind.
    const std::int64_t needed_rows = std::min(rows, p.n);
    const std::size_t taken = direct ? static_cast<std::size_t>(needed_rows * row_bytes) : scratch_bytes;
    void* const chunk = scratch(Scratch::dequantized, taken, stream);
    void* const cublas = scratch(Scratch::cublas, cublas_bytes, stream);
    auto* sums = reinterpret_cast<float*>(static_cast<char*>(chunk) + weight_bytes);

    for (std::int64_t first = 0; first < p.n; first += rows) {
        const std::int64_t count = std::min(rows, p.n - first);
        dequantize_rows(w, first, count, p.dtype, chunk, stream);
        const std::int64_t tokens =
            direct ? p.m : std::max<std::int64_t>(1, static_cast<std::int64_t>(weight_bytes) / (count * 4));
        for (std::int64_t token = 0; token < p.m; token += tokens) {
            cublaslt::Matmul matmul;
            matmul.m = std::min(tokens, p.m - token);
            matmul.n = count;
            matmul.k = p.k;
            matmul.in = p.dtype;
            matmul.out = direct ? p.dtype : DType::float32;
            matmul.x = static_cast<const char*>(p.x) + token * p.x_row_stride * 2;
            matmul.ldx = p.m == 1 ? p.k : p.x_row_stride;
            matmul.w = chunk;
            matmul.ldw = p.k;
            void* y = static_cast<char*>(p.y) + (token * p.n + first) * 2;
            matmul.d = direct ? y : sums;
            matmul.ldd = direct ? p.n : count;
            matmul.alpha = direct ? w.scale2 : 1.0f;
            matmul.workspace = cublas;
            matmul.workspace_bytes = cublas_bytes;
            matmul.stream = stream;
            cublaslt::matmul(matmul);
            if (direct) continue;
            const float* scale2_rows = w.per_row ? w.scale2_rows() + first : nullptr;
            const float* bias = w.bias() != nullptr ? w.bias() + first : nullptr;
            const auto launch =
                p.dtype == DType::float16 ? launch_scale_and_round<__half> : launch_scale_and_round<__nv_bfloat16>;
            launch(sums, matmul.m, count, w.scale2, scale2_rows, bias, y, p.n, stream);
        }
    }
}

}  // namespace fp4linear::cuda
