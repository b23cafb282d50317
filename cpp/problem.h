// One call: y[m, n] = x[m, k] * W^T + bias, with W the weight of the layer that runs it.
#pragma once
#include <cstdint>

#include "dtype.h"

namespace fp4linear {

struct Problem {
    std::int64_t m = 0;
    std::int64_t n = 0;  // out_features
    std::int64_t k = 0;  // in_features
    int block_size = 16;
    DType dtype = DType::float16;   // of x and of y
    const void* x = nullptr;        // rows are contiguous along k
    std::int64_t x_row_stride = 0;  // elements from a row of x to the next (0 repeats one row)
    void* y = nullptr;              // [m, n], C-contiguous
};

constexpr std::int64_t blocks_per_row(std::int64_t k, int block_size) { return (k + block_size - 1) / block_size; }

}  // namespace fp4linear
