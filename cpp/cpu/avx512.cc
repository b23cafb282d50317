// The kernels for AVX-512 without bf16 dot products (Skylake-X to Ice Lake).
#include "cpu/gemm_fma.h"
#include "cpu/gemv_fma.h"
#include "cpu/rows.h"
#include "cpu/simd_avx512.h"

namespace fp4linear::cpu {
namespace {

constexpr int gemv_rows = 8;
constexpr int gemm_rows = 13;
constexpr int gemm_tiles = 2;

void gemv_tile(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, Operand /*operand*/,
               int rows, float* sums) {
    __atomic_store_n(&last_kernels_name, avx512_kernels.name, __ATOMIC_RELAXED);
    gemv_fma_rows<SimdAvx512, gemv_rows>(tile, steps, plain_scales, x, rows, sums);
}

void decode(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, bool /*pairs*/, void* panel) {
    decode_fp32<SimdAvx512>(tile, steps, plain_scales, static_cast<float*>(panel));
}

void gemm_block(const void* x, Operand /*operand*/, int rows, const void* panel, std::int64_t panel_stride, int tiles,
                std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride) {
    __atomic_store_n(&last_kernels_name, avx512_kernels.name, __ATOMIC_RELAXED);
    const auto block =
        tiles == 1 ? gemm_fma_rows<SimdAvx512, 1, gemm_rows> : gemm_fma_rows<SimdAvx512, gemm_tiles, gemm_rows>;
    block(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
}

}  // namespace

constinit const KernelTable avx512_kernels = {
    .name = "avx512",
    .gemv_operand = {fp32_operand, fp32_operand, fp32_operand},
    .gemm_operand = {fp32_operand, fp32_operand, fp32_operand},
    .gemv_rows = gemv_rows,
    .gemm_rows = gemm_rows,
    .gemm_tiles = gemm_tiles,
    .scan = scan_row,
    .pack_gemv = pack_gemv_row,
    .pack_gemm = pack_gemm_row,
    .gemv_tile = gemv_tile,
    .decode = decode,
    .gemm_block = gemm_block,
    .finish = finish_row,
};

}  // namespace fp4linear::cpu
