// The arithmetic of the CUDA kernel of native_emulated, run on the host in the kernel's order, against the CPU's path:
// the same bits.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/native.h"
#include "cuda/device/native_emulated.cuh"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"

namespace {

using namespace fp4linear;
namespace gpu = fp4linear::cuda::emulated;

void test_doubled_codes() {
    for (std::uint32_t codes = 0; codes < 0x10000; ++codes) {
        const std::uint32_t bytes = gpu::doubled(codes | 0xABCD0000u);
        for (int i = 0; i < 4; ++i) {
            const auto got = static_cast<std::int8_t>(bytes >> 8 * i & 0xFFu);
            CHECK_EQ(static_cast<float>(got), 2 * float_from_e2m1(static_cast<std::uint8_t>(codes >> 4 * i)));
        }
    }
}

void test_scale_values() {
    for (int byte = 0; byte < 256; ++byte) {
        const float want = e4m3_values[static_cast<std::size_t>(byte)];
        const float got = gpu::scale_value(static_cast<std::uint8_t>(byte));
        CHECK(std::isnan(want) ? std::isnan(got)
                               : std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(want));
    }
}

void test_sums_become_floats() {
    constexpr int most = 16 * 12 * 12;
    for (int sum = -most; sum <= most; ++sum)
        CHECK_EQ(gpu::from_unit_bits(gpu::unit_bits + sum), static_cast<float>(sum));
}

struct Matrix {
    std::int64_t rows = 0, k = 0;
    std::vector<std::uint8_t> codes, scales;

    void block(std::int64_t row, std::int64_t c, std::uint32_t (&words)[gpu::words_of_block]) const {
        std::uint32_t packed[2] = {0, 0};
        for (std::int64_t i = c * 8; i < std::min(k / 2, (c + 1) * 8); ++i)
            packed[(i - c * 8) / 4] |= static_cast<std::uint32_t>(codes[static_cast<std::size_t>(row * (k / 2) + i)])
                                       << 8 * ((i - c * 8) % 4);
        for (int i = 0; i < gpu::words_of_block; ++i) words[i] = gpu::doubled(packed[i / 2] >> 16 * (i % 2));
    }
    [[nodiscard]] float scale(std::int64_t row, std::int64_t c) const {
        return gpu::scale_value(scales[static_cast<std::size_t>(row * blocks_per_row(k, 16) + c)]);
    }
};

std::uint16_t rounded(double value, DType dtype) {
    const auto once = static_cast<float>(value);
    return dtype == DType::float16 ? half_from_float(once) : bfloat_from_float(once);
}

bool is_nan(std::uint16_t bits, DType dtype) {
    return (bits & 0x7FFFu) > (dtype == DType::float16 ? 0x7C00u : 0x7F80u);
}

// kind 0: numbers of every day. 1: any finite scale byte, and x of many sizes. 2: NaN scales and x that is not finite.
void test_path(std::mt19937& random, std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, int kind) {
    const std::int64_t blocks = blocks_per_row(k, 16);
    Matrix weight{.rows = n, .k = k, .codes = {}, .scales = {}};
    weight.codes.resize(static_cast<std::size_t>(n * k / 2));
    weight.scales.resize(static_cast<std::size_t>(n * blocks));
    for (auto& byte : weight.codes) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : weight.scales) {
        byte = static_cast<std::uint8_t>(kind == 0 ? 0x20 + random() % 0x30 : random());
        if (kind < 2 && is_e4m3_nan(byte)) byte = 0xFE;
    }
    std::vector<std::uint16_t> x(static_cast<std::size_t>(m * k));
    std::normal_distribution<float> normal(0.0f, 3.0f);
    for (auto& each : x) {
        const float value =
            kind == 0 ? normal(random) : std::ldexp(normal(random), static_cast<int>(random() % 12) - 8);
        each = dtype == DType::float16 ? half_from_float(value) : bfloat_from_float(value);
        if (kind == 2 && random() % 300 == 0) each = static_cast<std::uint16_t>(random() | 0x7F80u);
    }
    std::vector<float> scale2(static_cast<std::size_t>(n)), bias(static_cast<std::size_t>(n));
    for (float& f : scale2) f = std::ldexp(normal(random), kind == 1 ? static_cast<int>(random() % 200) - 100 : -6);
    for (float& f : bias)
        f = kind == 1 ? std::ldexp(normal(random), static_cast<int>(random() % 60) - 30) : normal(random);

    std::vector<std::uint16_t> y(static_cast<std::size_t>(m * n), 0x7FFF);
    Problem p;
    p.m = m;
    p.n = n;
    p.k = k;
    p.dtype = dtype;
    p.x = x.data();
    p.x_row_stride = k;
    p.y = y.data();
    const cpu::Weight held(n, k, 16, weight.codes.data(), weight.scales.data());
    const bool per_row = n > 1, with_bias = random() % 2 == 0;
    const float given = kind == 0 ? 1.0f : std::ldexp(1.7f, static_cast<int>(random() % 9) - 4);
    const float g = random() % 3 == 0 ? cpu::dynamic_global_scale(p, 1) : given;
    cpu::run_native_emulated(
        held.view(), p, {.scale2 = scale2.data(), .per_row = per_row, .bias = with_bias ? bias.data() : nullptr}, g, 2);

    Matrix q{.rows = m, .k = k, .codes = {}, .scales = {}};
    q.codes.resize(static_cast<std::size_t>(m * k / 2));
    q.scales.resize(static_cast<std::size_t>(m * blocks));
    cpu::quantize_activations(p, g, ScaleLayout::plain, 1, q.codes.data(), q.scales.data());
    long wrong = 0;
    for (std::int64_t row = 0; row < m; ++row) {
        for (std::int64_t column = 0; column < n; ++column) {
            float sum = 0.0f;
            for (std::int64_t c = 0; c < blocks; ++c) {
                std::uint32_t a[gpu::words_of_block], b[gpu::words_of_block];
                q.block(row, c, a);
                weight.block(column, c, b);
                sum = gpu::add_block(a, b, q.scale(row, c), weight.scale(column, c) * gpu::product_unit, sum);
            }
            const auto at = static_cast<std::size_t>(column);
            const double value = gpu::finish(sum, scale2[per_row ? at : 0], g, with_bias ? &bias[at] : nullptr);
            const std::uint16_t got = rounded(value, dtype), want = y[static_cast<std::size_t>(row * n + column)];
            wrong += got == want || (is_nan(got, dtype) && is_nan(want, dtype)) ? 0 : 1;
        }
    }
    CHECK_EQ(wrong, 0);
}

}  // namespace

int main() {
    test_doubled_codes();
    test_scale_values();
    test_sums_become_floats();
    std::mt19937 random(1);
    for (const DType dtype : {DType::float16, DType::bfloat16})
        for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 2}, {17, 64}, {33, 178}, {5, 4112}})
            for (int kind = 0; kind < 3; ++kind)
                for (int round = 0; round < 3; ++round) test_path(random, 7, n, k, dtype, kind);
    return check_report();
}
