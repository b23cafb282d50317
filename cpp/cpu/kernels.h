// What an instruction set supplies: a table of leaf functions, each in its own translation unit that alone is
// compiled with the set's flags. Everything that decides (staging, tiling, threads) is in gemv.cc and gemm.cc, compiled
// for the baseline, so that no inline function of the standard library is ever emitted with wider
// instructions and then picked by the linker for everybody.
#pragma once
#include <cstdint>

#include "cpu/layout.h"
#include "dtype.h"

namespace fp4linear::cpu {

// How activations are staged: fp32, or the sum of one or two bf16 terms (exact for bf16 and fp16).
struct Operand {
    int planes = 1;
    int element_bytes = 4;
    [[nodiscard]] constexpr bool pairs() const { return element_bytes == 2; }
    [[nodiscard]] constexpr std::int64_t bytes(std::int64_t elements) const {
        return elements * planes * element_bytes;
    }
};
inline constexpr Operand fp32_operand{1, 4};
constexpr Operand bf16_terms(int planes) noexcept { return Operand{planes, 2}; }

// The dot-product units flush denormals, and an unscaled sum of a block may overflow where |x| is near the end of the
// range. A row that has nonzero values outside [2^-100, 2^100] is therefore split into rows of one band each,
// the outer ones scaled into the middle of the range, and their sums added at the end.
enum class Band : std::uint8_t { middle, low, high };
inline constexpr int band_bound_log2 = 100;
inline constexpr int band_shift_log2 = 64;  // low x 2^64, high x 2^-64

inline constexpr unsigned has_low = 1;
inline constexpr unsigned has_high = 2;

struct KernelTable {
    const char* name;
    Operand gemv_operand[3];  // by DType
    Operand gemm_operand[3];
    int gemv_rows;  // most rows of x that gemv_tile takes
    int gemm_rows;  // most rows and tiles of gemm_block
    int gemm_tiles;

    // has_low | has_high of one row of x (k elements, any alignment).
    unsigned (*scan)(DType dtype, const void* x, std::int64_t k);
    // Stages one row: its elements of one band, in chunks of 64 k zero-padded. gemv: [step][plane][64], a step to the
    // next at `stride` bytes. gemm: pairs [k/2][plane][stride 2-element slots] or fp32 [k][stride elements].
    void (*pack_gemv)(DType dtype, const void* x, std::int64_t k, Band band, Operand operand, void* out,
                      std::int64_t stride);
    void (*pack_gemm)(DType dtype, const void* x, std::int64_t k, Band band, Operand operand, void* out,
                      std::int64_t stride);
    // sums[rows][16]: `rows` staged rows times one tile.
    void (*gemv_tile)(const std::uint8_t* tile, std::int64_t steps, bool plain_scales, const void* x, Operand operand,
                      int rows, float* sums);
    // Steps of a tile to the panel of gemm_block: scaled weights, bf16 pairs [k/2][16][2] or fp32 [k][16].
    void (*decode)(const std::uint8_t* steps_begin, std::int64_t steps, bool plain_scales, bool pairs, void* panel);
    // sums[rows][row_stride] (+)= x * panel over k elements; panels of consecutive tiles lie panel_stride bytes apart.
    void (*gemm_block)(const void* x, Operand operand, int rows, const void* panel, std::int64_t panel_stride,
                       int tiles, std::int64_t k, bool accumulate, float* sums, std::int64_t row_stride);
    // y[i] = round(scale2[i or 0] * sum + bias[i]), sum = sum_b factors[b] * sums[b * band_stride + i], i < count.
    void (*finish)(const float* sums, std::int64_t band_stride, const double* factors, int bands, const float* scale2,
                   bool per_row, const float* bias, DType dtype, void* y, std::int64_t count);
};

// Null where the set is not built for this machine's architecture.
extern const KernelTable portable_kernels;
#if defined(__x86_64__)
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
extern const KernelTable avx512_bf16_kernels;
#endif

// Written by the kernels themselves (their own translation unit): the proof that a forced set ran.
extern const char* last_kernels_name;

}  // namespace fp4linear::cpu
