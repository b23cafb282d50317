// The kernels for any machine, in the vector types of GCC and Clang (SSE2, NEON or plain code, as the target has).
#include "cpu/gemm_fma.h"
#include "cpu/gemv_fma.h"
#include "cpu/rows.h"
#include "formats/e4m3.h"

namespace fp4linear::cpu {
namespace {

struct SimdPortable {
    static constexpr int lanes = 4;
    static constexpr int side = 1;
    using Float = float __attribute__((vector_size(16)));
    using Codes = std::uint32_t __attribute__((vector_size(16)));
    static Float zero() { return Float{}; }
    static Float load(const float* at) {
        Float value;
        std::memcpy(&value, at, sizeof(value));
        return value;
    }
    static void store(float* at, Float value) { std::memcpy(at, &value, sizeof(value)); }
    static Float broadcast(const float* at) { return Float{*at, *at, *at, *at}; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float fma(Float a, Float b, Float c) { return a * b + c; }
    static Codes load_codes(const std::uint8_t* at) {
        Codes value;
        std::memcpy(&value, at, sizeof(value));
        return value;
    }
    // Arithmetic instead of table loads, which go lane by lane. A magnitude m = 2..7 is the float (m + 252) << 22: its
    // upper two bits are the exponent, with bias 126, its lowest the mantissa. For m = 0 and 1 that gives 0.5 and 0.75.
    template <int shift>
    static Float nibble(Codes codes) {
        const Codes magnitude = (codes >> shift) & 7u;
        const Codes is_half = (Codes)(magnitude == 1u);  // all ones where true: -1
        const Codes is_zero = (Codes)(magnitude == 0u);
        const Codes bits = (((magnitude + 252u + is_half) << 22) & ~is_zero) | ((codes << (28 - shift)) & 0x80000000u);
        return (Float)bits;
    }
    template <int j>
    static void weights(Codes codes, Float& even, Float& odd) {
        even = nibble<4 * j>(codes);
        odd = nibble<16 + 4 * j>(codes);
    }
    static void decode_scales(const std::uint8_t* bytes, bool /*plain*/, int first_row, Float* scale) {
        for (int g = 0; g < step_groups; ++g) {
            const std::uint8_t* at = bytes + g / 2 * 2 * tile_rows + 2 * first_row + g % 2;
            scale[g] = Float{e4m3_values[at[0]], e4m3_values[at[2]], e4m3_values[at[4]], e4m3_values[at[6]]} *
                       static_cast<float>(1.0 / sum_factor);
        }
    }
};

constexpr int gemv_rows = 2;
constexpr int gemm_rows = 2;
constexpr int gemm_tiles = 1;

void gemv_tile(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, Operand /*operand*/,
               int rows, float* sums) {
    __atomic_store_n(&last_kernels_name, portable_kernels.name, __ATOMIC_RELAXED);
    gemv_fma_rows<SimdPortable, gemv_rows>(tile, steps, plain_scales, x, rows, sums);
}

void decode(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, bool /*pairs*/, void* panel) {
    decode_fp32<SimdPortable>(tile, steps, plain_scales, static_cast<float*>(panel));
}

void gemm_block(const void* x, Operand /*operand*/, int rows, const void* panel, std::int64_t panel_stride,
                int /*tiles*/, std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride) {
    __atomic_store_n(&last_kernels_name, portable_kernels.name, __ATOMIC_RELAXED);
    gemm_fma_rows<SimdPortable, gemm_tiles, gemm_rows>(x, rows, panel, panel_stride, k, accumulate, sums, row_stride);
}

}  // namespace

constinit const KernelTable portable_kernels = {
    .name = "portable",
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
