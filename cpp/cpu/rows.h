// Staging of activations and the epilogue: plain loops over 64 or 16 elements, which the compiler vectorises for the
// instruction set of the including file. Everything has internal linkage and uses no library templates (kernels.h says
// why).
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu/kernels.h"

namespace fp4linear::cpu {
namespace {  // NOLINT(google-build-namespaces): one copy an instruction set, on purpose

constexpr std::uint32_t magnitude_mask = 0x7FFFFFFFu;
constexpr std::uint32_t infinity_bits = 0x7F800000u;
constexpr std::uint32_t band_low_bits = static_cast<std::uint32_t>(127 - band_bound_log2) << 23;
constexpr std::uint32_t band_high_bits = static_cast<std::uint32_t>(127 + band_bound_log2) << 23;
constexpr float band_up = 0x1p64f;
constexpr float band_down = 0x1p-64f;
static_assert(band_shift_log2 == 64);

inline std::uint32_t bits_of(float value) { return __builtin_bit_cast(std::uint32_t, value); }
inline float float_of(std::uint32_t bits) { return __builtin_bit_cast(float, bits); }

// Branch-free forms of formats/float16.h.
inline float widen_half(std::uint16_t h) {
    const std::uint32_t magnitude = (h & 0x7FFFu) << 13;
    // The multiplication also normalises subnormals.
    const std::uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const std::uint32_t bits = magnitude >= 0x0F800000u ? (magnitude | infinity_bits) : finite;
    return float_of(bits | ((h & 0x8000u) << 16));
}
inline std::uint16_t narrow_half(float value) {  // to nearest even
    const std::uint32_t magnitude = bits_of(value) & magnitude_mask;
    // Adding 0.5 puts the last bit of the sum at 2^-24, the spacing of subnormal halves.
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    const std::uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    std::uint32_t bits = magnitude < 0x38800000u ? subnormal : normal;
    bits = magnitude >= 0x477FF000u ? 0x7C00u : bits;
    bits = magnitude > infinity_bits ? 0x7E00u : bits;
    return static_cast<std::uint16_t>(bits | ((bits_of(value) >> 16) & 0x8000u));
}
inline std::uint16_t narrow_bfloat(float value) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>((bits & magnitude_mask) > infinity_bits ? nan : rounded);
}

// Elements [k0, k0 + 64) of a row of k, as fp32, zero beyond its end. The row may lie at any byte.
inline void widen_chunk(DType dtype, const void* x, std::int64_t k0, std::int64_t k, float* out) {
    const int count = k - k0 < step_k ? static_cast<int>(k - k0) : step_k;
    const auto element = static_cast<std::int64_t>(size_of(dtype));
    const unsigned char* source = static_cast<const unsigned char*>(x) + k0 * element;
    if (dtype == DType::float32) {
        if (count < step_k) std::memset(out, 0, step_k * sizeof(float));
        std::memcpy(out, source, static_cast<std::size_t>(count * element));
        return;
    }
    std::uint16_t raw[step_k];
    if (count < step_k) std::memset(raw, 0, sizeof(raw));
    std::memcpy(raw, source, static_cast<std::size_t>(count * element));
    if (dtype == DType::float16) {
        for (int i = 0; i < step_k; ++i) out[i] = widen_half(raw[i]);
    } else {
        for (int i = 0; i < step_k; ++i) out[i] = float_of(static_cast<std::uint32_t>(raw[i]) << 16);
    }
}

constexpr int most_planes = 2;

inline void select_band(Band band, float* values) {
    for (int i = 0; i < step_k; ++i) {
        const std::uint32_t magnitude = bits_of(values[i]) & magnitude_mask;
        const bool low = magnitude < band_low_bits;
        const bool high = magnitude > band_high_bits && magnitude < infinity_bits;
        const float middle = low || high ? 0.0f : values[i];
        const float lifted = low ? values[i] * band_up : 0.0f;
        const float lowered = high ? values[i] * band_down : 0.0f;
        values[i] = band == Band::middle ? middle : band == Band::low ? lifted : lowered;
    }
}

// values = sum of planes bf16 terms, exactly; terms[plane][64]. An infinity or NaN goes to the first term alone,
// else the remainder inf - inf would turn an infinite result into NaN.
inline void split_terms(float* values, int planes, std::uint16_t* terms) {
    for (int plane = 0; plane < planes; ++plane) {
        for (int i = 0; i < step_k; ++i) {
            const std::uint16_t term = narrow_bfloat(values[i]);
            terms[plane * step_k + i] = term;
            const float rest = values[i] - float_of(static_cast<std::uint32_t>(term) << 16);
            values[i] = (bits_of(values[i]) & magnitude_mask) >= infinity_bits ? 0.0f : rest;
        }
    }
}

unsigned scan_row(DType dtype, const void* x, std::int64_t k) {
    if (dtype == DType::float16) return 0;  // 2^-24 .. 65504 is inside the middle band
    std::uint32_t low = 0;
    std::uint32_t high = 0;
    for (std::int64_t k0 = 0; k0 < k; k0 += step_k) {
        float values[step_k];
        widen_chunk(dtype, x, k0, k, values);
        for (int i = 0; i < step_k; ++i) {
            const std::uint32_t magnitude = bits_of(values[i]) & magnitude_mask;
            low |= static_cast<std::uint32_t>(magnitude != 0) & static_cast<std::uint32_t>(magnitude < band_low_bits);
            high |= static_cast<std::uint32_t>(magnitude > band_high_bits) &
                    static_cast<std::uint32_t>(magnitude < infinity_bits);
        }
    }
    return (low ? has_low : 0u) | (high ? has_high : 0u);
}

void pack_gemv_row(DType dtype, const void* x, std::int64_t k, Band band, Operand operand, void* out,
                   std::int64_t stride) {
    auto* to = static_cast<unsigned char*>(out);
    for (std::int64_t k0 = 0; k0 < k; k0 += step_k, to += stride) {
        float values[step_k];
        widen_chunk(dtype, x, k0, k, values);
        if (dtype != DType::float16) select_band(band, values);
        if (operand.pairs()) {
            std::uint16_t terms[most_planes * step_k];
            split_terms(values, operand.planes, terms);
            std::memcpy(to, terms, static_cast<std::size_t>(operand.bytes(step_k)));
        } else {
            std::memcpy(to, values, sizeof(values));
        }
    }
}

void pack_gemm_row(DType dtype, const void* x, std::int64_t k, Band band, Operand operand, void* out,
                   std::int64_t stride) {
    // A slot is what one broadcast reads: a pair of bf16 or one fp32, 32 bits either way.
    auto* to = static_cast<std::uint32_t*>(out);
    for (std::int64_t k0 = 0; k0 < k; k0 += step_k) {
        float values[step_k];
        widen_chunk(dtype, x, k0, k, values);
        if (dtype != DType::float16) select_band(band, values);
        if (operand.pairs()) {
            std::uint16_t terms[most_planes * step_k];
            split_terms(values, operand.planes, terms);
            for (int pair = 0; pair < step_k / 2; ++pair) {
                for (int plane = 0; plane < operand.planes; ++plane, to += stride) {
                    std::memcpy(to, terms + plane * step_k + 2 * pair, sizeof(std::uint32_t));
                }
            }
        } else {
            for (int i = 0; i < step_k; ++i, to += stride) std::memcpy(to, values + i, sizeof(std::uint32_t));
        }
    }
}

// Sixteen columns or fewer of one row of y.
template <int columns>
inline void finish_columns(const float* sums, std::int64_t band_stride, const double* factors, int bands,
                           const float* scale2, bool per_row, const float* bias, DType dtype, unsigned char* y,
                           int count) {
    // A known count (columns > 0) turns the copies into single instructions.
    const auto part = static_cast<std::size_t>(columns > 0 ? columns : count);
    float scale[tile_rows];
    float add[tile_rows] = {};
    double total[tile_rows];
    float result[tile_rows];
    for (int i = 0; i < tile_rows; ++i) scale[i] = scale2[0];
    if (per_row) std::memcpy(scale, scale2, part * sizeof(float));
    if (bias != nullptr) std::memcpy(add, bias, part * sizeof(float));
    for (int i = 0; i < tile_rows; ++i) total[i] = sums[i] * factors[0];
    for (int band = 1; band < bands; ++band) {
        for (int i = 0; i < tile_rows; ++i) total[i] += sums[band * band_stride + i] * factors[band];
    }
    // In double the product is exact, so that only the cast rounds.
    for (int i = 0; i < tile_rows; ++i) total[i] *= scale[i];
    // Without a bias nothing is added: it would turn -0 into +0.
    if (bias != nullptr) {
        for (int i = 0; i < tile_rows; ++i) total[i] += add[i];
    }
    for (int i = 0; i < tile_rows; ++i) result[i] = static_cast<float>(total[i]);
    if (dtype == DType::float32) {
        std::memcpy(y, result, part * sizeof(float));
        return;
    }
    std::uint16_t narrow[tile_rows];
    if (dtype == DType::float16) {
        for (int i = 0; i < tile_rows; ++i) narrow[i] = narrow_half(result[i]);
    } else {
        for (int i = 0; i < tile_rows; ++i) narrow[i] = narrow_bfloat(result[i]);
    }
    std::memcpy(y, narrow, part * sizeof(std::uint16_t));
}

// sums has whole tiles of columns, so that a short last part may read all of its tile.
void finish_row(const float* sums, std::int64_t band_stride, const double* factors, int bands, const float* scale2,
                bool per_row, const float* bias, DType dtype, void* y, std::int64_t count) {
    auto* to = static_cast<unsigned char*>(y);
    for (std::int64_t i = 0; i < count; i += tile_rows) {
        const float* scale = per_row ? scale2 + i : scale2;
        const float* add = bias == nullptr ? nullptr : bias + i;
        if (count - i >= tile_rows) {
            finish_columns<tile_rows>(sums + i, band_stride, factors, bands, scale, per_row, add, dtype, to, tile_rows);
        } else {
            finish_columns<0>(sums + i, band_stride, factors, bands, scale, per_row, add, dtype, to,
                              static_cast<int>(count - i));
        }
        to += tile_rows * size_of(dtype);
    }
}

}  // namespace
}  // namespace fp4linear::cpu
