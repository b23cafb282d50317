#include "cuda/aligned_rows.h"

#include "cuda/weight.h"
#include "cuda/workspace.h"

namespace fp4linear::cuda {

bool starts_aligned(const Problem& p) { return reinterpret_cast<std::uintptr_t>(p.x) % row_alignment == 0; }

const void* aligned_copy(const Problem& p, cudaStream_t stream) {
    constexpr std::int64_t size = 2;
    void* const copy = scratch(Scratch::aligned_x, static_cast<std::size_t>(p.m * p.k * size), stream);
    const std::int64_t shape[2] = {p.m, p.k};
    const std::int64_t strides[2] = {p.x_row_stride * size, size};
    gather(copy, p.x, 2, shape, strides, stream);
    return copy;
}

}  // namespace fp4linear::cuda
