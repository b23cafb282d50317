#include "cpu/native.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "cpu/layout.h"
#include "cpu/staging.h"
#include "cpu/thread_pool.h"
#include "cpu/weight.h"
#include "formats/activation.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "formats/swizzle.h"

namespace fp4linear::cpu {
namespace {

constexpr int block = activation::block_size;
constexpr std::int64_t rows_a_pass = 64;     // rows of x quantised at once and multiplied with each tile
constexpr std::int64_t quantizing_work = 8;  // of an element of x, in multiplications of the GEMM

// Bits of the fp32 values of x[k0, k0 + count); the row may lie at any byte.
void widen(DType dtype, const void* row, std::int64_t k0, int count, std::uint32_t* bits) {
    const auto element = static_cast<std::int64_t>(size_of(dtype));
    const auto* from = static_cast<const std::uint8_t*>(row) + k0 * element;
    const auto bytes = static_cast<std::size_t>(count * element);
    if (dtype == DType::float32) {
        std::memcpy(bits, from, bytes);
        return;
    }
    std::uint16_t raw[block];
    std::memcpy(raw, from, bytes);
    for (int i = 0; i < count; ++i)
        bits[i] = dtype == DType::float16 ? std::bit_cast<std::uint32_t>(float_from_half(raw[i]))
                                          : static_cast<std::uint32_t>(raw[i]) << 16;
}

// Calls visit(block index, its scale, its codes, their number) for the blocks of one row of x.
template <class Visit>
void quantize_row(const Problem& problem, std::int64_t row, activation::Split g, Visit&& visit) {
    const void* x = row_of(problem, row);
    const std::int64_t blocks = blocks_per_row(problem.k, block);
    for (std::int64_t c = 0; c < blocks; ++c) {
        const int count = static_cast<int>(std::min<std::int64_t>(block, problem.k - c * block));
        std::uint32_t bits[block];
        std::uint8_t codes[block];
        widen(problem.dtype, x, c * block, count, bits);
        const std::uint8_t scale = activation::quantize_block(bits, count, g, codes);
        visit(c, scale, codes, count);
    }
}

activation::Split split_scale(float g) { return activation::split(std::bit_cast<std::uint32_t>(g)); }

// Rows of x as the multiplication reads them: values of the codes [k, zero-padded to whole blocks], and of the scales.
struct QuantizedRows {
    std::int64_t blocks;
    std::vector<float> values, scales;

    QuantizedRows(std::int64_t rows, std::int64_t k)
        : blocks(blocks_per_row(k, block)),
          values(static_cast<std::size_t>(rows * blocks * block)),
          scales(static_cast<std::size_t>(rows * blocks)) {}
};

// A tile of the weight: the values of its codes [k, 16 rows], of its scales [blocks, 16 rows].
struct DecodedTile {
    std::vector<float> values, scales;
    std::vector<std::uint8_t> codes, bytes;

    explicit DecodedTile(std::int64_t k) {
        const auto blocks = static_cast<std::size_t>(blocks_per_row(k, block));
        values.resize(blocks * block * tile_rows);
        scales.resize(blocks * tile_rows);
        codes.resize(static_cast<std::size_t>(k / 2) * tile_rows);
        bytes.resize(blocks * tile_rows);
    }

    void decode(const WeightView& weight, std::int64_t tile) {
        const std::int64_t rows = std::min<std::int64_t>(tile_rows, weight.n - tile * tile_rows);
        const std::int64_t blocks = blocks_per_row(weight.k, block);
        untile_weight(rows, weight.k, block, tile_of(weight, tile), codes.data(), bytes.data());
        for (std::int64_t r = 0; r < rows; ++r) {
            const std::uint8_t* row = codes.data() + r * (weight.k / 2);
            for (std::int64_t k = 0; k < weight.k; ++k) values[k * tile_rows + r] = float_from_e2m1(e2m1_code(row, k));
            for (std::int64_t c = 0; c < blocks; ++c) scales[c * tile_rows + r] = e4m3_values[bytes[r * blocks + c]];
        }
    }
};

// Sums [rows][16] of rows of x, one to two of them, with one tile. A block's products and their sum are multiples of
// 1/4 below 577, so that no order and no contraction can change them; the two scales make it at most 20 bits.
constexpr int rows_a_multiply = 2;

using Lanes = float __attribute__((vector_size(16)));  // of GCC and Clang, for any target
constexpr int vectors = tile_rows / 4;

Lanes load(const float* at) {
    Lanes value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <int rows>
void multiply(const QuantizedRows& x, std::int64_t first_row, const DecodedTile& tile, float* sums) {
    const float* w = tile.values.data();
    const float* w_scales = tile.scales.data();
    const float* values = x.values.data() + first_row * x.blocks * block;
    const float* scales = x.scales.data() + first_row * x.blocks;
    Lanes total[rows][vectors] = {};
    for (std::int64_t c = 0; c < x.blocks; ++c, w += block * tile_rows, w_scales += tile_rows) {
        Lanes dot[rows][vectors] = {};
        FP4LINEAR_UNROLL
        for (int i = 0; i < block; ++i) {
            FP4LINEAR_UNROLL
            for (int row = 0; row < rows; ++row) {
                const float value = values[(row * x.blocks + c) * block + i];
                FP4LINEAR_UNROLL
                for (int v = 0; v < vectors; ++v) dot[row][v] += value * load(w + i * tile_rows + 4 * v);
            }
        }
        FP4LINEAR_UNROLL
        for (int row = 0; row < rows; ++row) {
            FP4LINEAR_UNROLL
            for (int v = 0; v < vectors; ++v)
                total[row][v] += dot[row][v] * (scales[row * x.blocks + c] * load(w_scales + 4 * v));
        }
    }
    std::memcpy(sums, total, sizeof total);
}

void store(DType dtype, double value, void* y, std::int64_t index) {
    const auto rounded = static_cast<float>(value);
    auto* to = static_cast<std::uint8_t*>(y) + static_cast<std::size_t>(index) * size_of(dtype);
    if (dtype == DType::float32) {
        std::memcpy(to, &rounded, sizeof rounded);
    } else {
        const std::uint16_t bits = dtype == DType::float16 ? half_from_float(rounded) : bfloat_from_float(rounded);
        std::memcpy(to, &bits, sizeof bits);
    }
}

}  // namespace

float dynamic_global_scale(const Problem& problem, int threads) {
    std::atomic<std::uint32_t> greatest{0};
    const auto rows = [&](std::int64_t begin, std::int64_t end) {
        std::uint32_t amax = 0;
        for (std::int64_t row = begin; row < end; ++row) {
            for (std::int64_t k = 0; k < problem.k; k += block) {
                const int count = static_cast<int>(std::min<std::int64_t>(block, problem.k - k));
                std::uint32_t bits[block];
                widen(problem.dtype, row_of(problem, row), k, count, bits);
                for (int i = 0; i < count; ++i) {
                    const std::uint32_t magnitude = bits[i] & activation::magnitude_bits;
                    if (magnitude < activation::infinity_bits) amax = std::max(amax, magnitude);
                }
            }
        }
        std::uint32_t seen = greatest.load(std::memory_order_relaxed);
        while (seen < amax && !greatest.compare_exchange_weak(seen, amax, std::memory_order_relaxed)) {
        }
    };
    parallel_ranges(problem.m, threads_for(problem.m * problem.k, threads), rows);
    return activation::global_scale_for(std::bit_cast<float>(greatest.load(std::memory_order_relaxed)));
}

void quantize_activations(const Problem& problem, float global_scale, ScaleLayout layout, int threads,
                          std::uint8_t* codes, std::uint8_t* scales) {
    const activation::Split g = split_scale(global_scale);
    const std::int64_t blocks = blocks_per_row(problem.k, block);
    const bool swizzled = layout == ScaleLayout::swizzled;
    if (swizzled) std::fill_n(scales, swizzle::size(problem.m, blocks), std::uint8_t{0});
    const auto rows = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
            std::uint8_t* out = codes + row * (problem.k / 2);
            quantize_row(problem, row, g, [&](std::int64_t c, std::uint8_t scale, const std::uint8_t* code, int count) {
                scales[swizzled ? swizzle::offset(row, c, blocks) : row * blocks + c] = scale;
                for (int i = 0; i < count; i += 2) out[(c * block + i) / 2] = pack_e2m1(code[i], code[i + 1]);
            });
        }
    };
    parallel_ranges(problem.m, threads_for(problem.m * problem.k * quantizing_work, threads), rows);
}

void run_native_emulated(const WeightView& weight, const Problem& problem, const Epilogue& epilogue, float global_scale,
                         int threads) {
    if (global_scale == 0.0f) global_scale = dynamic_global_scale(problem, threads);
    const activation::Split g = split_scale(global_scale);
    for (std::int64_t first = 0; first < problem.m; first += rows_a_pass) {
        const std::int64_t rows = std::min(rows_a_pass, problem.m - first);
        QuantizedRows x(rows, problem.k);
        const auto quantize = [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t row = begin; row < end; ++row) {
                quantize_row(problem, first + row, g,
                             [&](std::int64_t c, std::uint8_t scale, const std::uint8_t* codes, int count) {
                                 const std::int64_t at = row * x.blocks + c;
                                 x.scales[at] = e4m3_values[scale];
                                 for (int i = 0; i < count; ++i) x.values[at * block + i] = float_from_e2m1(codes[i]);
                             });
            }
        };
        parallel_ranges(rows, threads_for(rows * problem.k * quantizing_work, threads), quantize);

        const auto tiles = [&](std::int64_t begin, std::int64_t end) {
            DecodedTile tile(problem.k);
            for (std::int64_t t = begin; t < end; ++t) {
                tile.decode(weight, t);
                const std::int64_t column = t * tile_rows;
                const std::int64_t columns = std::min<std::int64_t>(tile_rows, weight.n - column);
                for (std::int64_t row = 0; row < rows; row += rows_a_multiply) {
                    float sums[rows_a_multiply * tile_rows];
                    const std::int64_t count = std::min<std::int64_t>(rows_a_multiply, rows - row);
                    count == 1 ? multiply<1>(x, row, tile, sums) : multiply<rows_a_multiply>(x, row, tile, sums);
                    for (std::int64_t i = 0; i < count * tile_rows; ++i) {
                        const std::int64_t r = i % tile_rows, n = column + r, m = first + row + i / tile_rows;
                        if (r >= columns) continue;
                        // The product is exact in fp64; alpha = scale2 / g is never rounded to fp32 nor overflows.
                        double value = static_cast<double>(sums[i]) * epilogue.scale2[epilogue.per_row ? n : 0] /
                                       static_cast<double>(global_scale);
                        if (epilogue.bias != nullptr) value += epilogue.bias[n];
                        store(problem.dtype, value, problem.y, m * problem.n + n);
                    }
                }
            }
        };
        parallel_ranges(weight.tiles, threads_for(weight.n * problem.k * rows, threads), tiles);
    }
}

}  // namespace fp4linear::cpu
