#include "cuda/dequantize_rows.h"

#include "cuda/backend.h"
#include "cuda/check.h"
#include "cuda/kernels.h"

namespace fp4linear::cuda {

void dequantize_rows(const DeviceWeight& w, std::int64_t first, std::int64_t count, DType dtype, void* out,
                     cudaStream_t stream) {
    if (w.form == WeightForm::prepacked) {
        FP4LINEAR_CUDA_CHECK(dequantize_prepacked(w.prepacked(), w.k, first, first + count, dtype, out, stream));
        return;
    }
    DequantizeArguments rows;
    rows.n = count;
    rows.k = w.k;
    rows.block_size = w.block_size;
    rows.b = w.b() + first * (w.k / 2);
    rows.scales = w.scales() + first * blocks_per_row(w.k, w.block_size);
    dequantize(rows, dtype, out, stream);
}

void dequantize_rows(const Weight& weight, std::int64_t first, std::int64_t count, DType dtype, void* out,
                     float* scale2, void* stream) {
    const auto& w = static_cast<const DeviceWeight&>(weight);
    const auto s = static_cast<cudaStream_t>(stream);
    dequantize_rows(w, first, count, dtype, out, s);
    if (scale2 != nullptr)
        FP4LINEAR_CUDA_CHECK(cudaMemcpyAsync(scale2, w.scale2_rows() + first,
                                             static_cast<std::size_t>(count) * sizeof(float), cudaMemcpyDeviceToDevice,
                                             s));
}

}  // namespace fp4linear::cuda
