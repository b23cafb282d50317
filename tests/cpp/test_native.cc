// The activation quantiser and the emulated native path, against searches and sums in fp64 that share nothing with
// them.
#include "cpu/native.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "formats/activation.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "formats/swizzle.h"

namespace {

using namespace fp4linear;
namespace act = fp4linear::activation;

std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }

// Nearest of an ascending table, the even index of two as near. In fp64 x * g is exact, and a quotient of it is a
// midpoint only where the exact one is.
int nearest_even(double value, std::span<const float> table) {
    int best = 0;
    for (std::size_t i = 1; i < table.size(); ++i) {
        const double middle = (static_cast<double>(table[i - 1]) + table[i]) / 2;
        if (value > middle || (value == middle && i % 2 == 0)) best = static_cast<int>(i);
    }
    return best;
}

struct Wanted {
    std::uint8_t scale;
    std::uint8_t codes[16];
};

Wanted want(const float* x, int count, float g) {
    Wanted w{};
    double amax = 0.0;
    bool finite = true;
    for (int i = 0; i < count; ++i) {
        finite = finite && std::isfinite(x[i]);
        amax = std::max(amax, std::fabs(static_cast<double>(x[i])));
    }
    if (!finite) {
        w.scale = 0x7F;
        return w;
    }
    w.scale = static_cast<std::uint8_t>(nearest_even(amax * g / 6, std::span(e4m3_values).first(0x7F)));
    if (w.scale == 0) return w;
    for (int i = 0; i < count; ++i) {
        const double quotient = std::fabs(static_cast<double>(x[i])) * g / e4m3_values[w.scale];
        w.codes[i] = static_cast<std::uint8_t>(nearest_even(quotient, std::span(e2m1_values).first(8)) |
                                               (std::signbit(x[i]) ? 8 : 0));
    }
    return w;
}

// A block that a compiler quantises: 6 keeps its value, 2.5 is a tie and goes to 2, -0 keeps its sign.
constexpr bool quantises_in_a_constant_expression() {
    const std::uint32_t x[4] = {0x40C00000u, 0xC0200000u, 0x80000000u, 0x3F400000u};  // 6, -2.5, -0, 0.75
    std::uint8_t codes[4] = {};
    const std::uint8_t scale = act::quantize_block(x, 4, act::split(0x3F800000u), codes);
    return scale == 0x38 && codes[0] == 7 && codes[1] == (8 | 4) && codes[2] == 8 && codes[3] == 2;
}
static_assert(quantises_in_a_constant_expression());

void test_block(const float* x, int count, float g) {
    std::uint32_t bits[16];
    for (int i = 0; i < count; ++i) bits[i] = bits_of(x[i]);
    std::uint8_t codes[16];
    std::fill_n(codes, 16, std::uint8_t{0xAA});
    const std::uint8_t scale = act::quantize_block(bits, count, act::split(bits_of(g)), codes);
    const Wanted wanted = want(x, count, g);
    CHECK_EQ(int{scale}, int{wanted.scale});
    CHECK(std::equal(codes, codes + count, wanted.codes));
    for (int i = count; i < 16; ++i) CHECK_EQ(int{codes[i]}, 0xAA);
}

float random_float(std::mt19937& random, int least_exponent, int greatest_exponent) {
    const auto exponent = std::uniform_int_distribution<int>(least_exponent, greatest_exponent)(random);
    const auto mantissa = std::uniform_real_distribution<double>(1.0, 2.0)(random);
    const double value = std::ldexp(mantissa, exponent);
    const double most = std::numeric_limits<float>::max();
    return static_cast<float>((random() & 1u) != 0 ? std::min(value, most) : -std::min(value, most));
}

void test_products_are_rounded_to_odd() {
    std::mt19937 random(1);
    for (int i = 0; i < 200000; ++i) {
        const float x = std::fabs(random_float(random, -149, 127));
        const float g = std::fabs(random_float(random, -149, 127));
        const std::uint32_t got = act::product(bits_of(x), act::split(bits_of(g)));
        const double exact = static_cast<double>(x) * g;  // 48 bits
        if (exact < 0x1p-126) {
            CHECK_EQ(got, 0u);
            continue;
        }
        if (exact >= 0x1p128) {
            CHECK_EQ(got, act::greatest_finite_bits);
            continue;
        }
        const auto value = static_cast<double>(std::bit_cast<float>(got));
        // Exact, or odd and on either side of the exact product by less than a unit in the last place.
        const double unit = static_cast<double>(std::bit_cast<float>(got & 0x7F800000u)) * 0x1p-23;
        CHECK(value == exact || ((got & 1u) != 0 && std::fabs(value - exact) < unit));
    }
}

void test_scales_at_and_beside_every_midpoint() {
    for (const float g : {1.0f, 3.0f, 0.25f, 2688.0f}) {
        for (int byte = 0; byte < 0x7E; ++byte) {
            const double middle = (static_cast<double>(e4m3_values[static_cast<std::size_t>(byte)]) +
                                   e4m3_values[static_cast<std::size_t>(byte) + 1]) /
                                  2;
            const auto at = static_cast<float>(middle * 6 / g);
            for (const float x : {std::nextafter(at, 0.0f), at, std::nextafter(at, 1e9f)}) test_block(&x, 1, g);
        }
    }
}

void test_codes_at_and_beside_every_midpoint() {
    for (const float g : {1.0f, 3.0f, 0.1f, 0x1p-100f}) {
        for (int byte = 1; byte <= 0x7E; ++byte) {
            const double scale = e4m3_values[static_cast<std::size_t>(byte)];
            for (int i = 0; i < 7; ++i) {
                const double middle = (static_cast<double>(e2m1_values[static_cast<std::size_t>(i)]) +
                                       e2m1_values[static_cast<std::size_t>(i) + 1]) /
                                      2;
                const auto at = static_cast<float>(middle * scale / g);
                const float x[4] = {static_cast<float>(6 * scale / g), std::nextafter(at, 0.0f), -at,
                                    std::nextafter(at, std::numeric_limits<float>::infinity())};
                test_block(x, 4, g);
            }
        }
    }
}

void test_random_blocks() {
    std::mt19937 random(2);
    for (int i = 0; i < 30000; ++i) {
        const int count = std::uniform_int_distribution<int>(1, 16)(random);
        const int top = std::uniform_int_distribution<int>(-140, 127)(random);
        float x[16];
        for (int j = 0; j < count; ++j) x[j] = random_float(random, top - 6, top);
        // A g that makes most blocks' scales those of the middle of E4M3, and now and then one far off.
        const int off = i % 10 == 0 ? 60 : 8;
        const int power = std::clamp(std::uniform_int_distribution<int>(-off, off)(random) - top, -149, 126);
        test_block(x, count, std::fabs(random_float(random, power, power)));
    }
}

void test_special_values() {
    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float least = std::numeric_limits<float>::denorm_min();
    const float most = std::numeric_limits<float>::max();
    for (const float g : {1.0f, most, least, 0x1p127f, 0x1p-126f, 1e-3f}) {
        for (const float special : {infinity, -infinity, nan, -nan, least, -least, most, -most, 0.0f, -0.0f, 0x1p-126f})
            for (const float other : {1.0f, 0.0f, -0.0f, most, least, 0x1p-10f * 6, 448.0f * 6, 464.0f * 6}) {
                const float x[3] = {other, special, -other};
                test_block(x, 3, g);
            }
    }
}

void test_dynamic_global_scale() {
    CHECK_EQ(act::global_scale_for(0.0f), 1.0f);
    CHECK_EQ(act::global_scale_for(2688.0f), 1.0f);
    CHECK_EQ(act::global_scale_for(6.0f), 448.0f);
    // Finite, positive and the rounded quotient (or the greatest number) for every magnitude, at the bound above all.
    const float bound = 2688.0f / std::numeric_limits<float>::max();
    for (std::uint32_t bits = bits_of(bound) - 100; bits < bits_of(bound) + 100; ++bits) {
        const float amax = std::bit_cast<float>(bits), g = act::global_scale_for(amax);
        CHECK(std::isfinite(g) && g > 0.0f);
        CHECK_EQ(g, std::min(2688.0f / amax, std::numeric_limits<float>::max()));
    }
    for (const float amax : {std::numeric_limits<float>::denorm_min(), 1e-30f, 1.0f, std::numeric_limits<float>::max()})
        CHECK_EQ(act::global_scale_for(amax), std::min(2688.0f / amax, std::numeric_limits<float>::max()));
}

struct Activations {
    std::int64_t m, k;
    DType dtype;
    std::vector<float> values;
    std::vector<std::uint8_t> bytes;  // rows `stride` elements apart, from an odd address on
    Problem problem;

    Activations(std::mt19937& random, std::int64_t rows, std::int64_t columns, DType type)
        : m(rows), k(columns), dtype(type) {
        const std::int64_t stride = k + 3;
        bytes.assign(static_cast<std::size_t>(m * stride) * size_of(dtype) + 1, 0xFF);  // NaN between the rows
        values.resize(static_cast<std::size_t>(m * k));
        for (std::int64_t row = 0; row < m; ++row) {
            for (std::int64_t i = 0; i < k; ++i) {
                float value = random_float(random, -6, 3);
                const std::uint16_t half = dtype == DType::float16 ? half_from_float(value) : bfloat_from_float(value);
                if (dtype == DType::float16) value = float_from_half(half);
                if (dtype == DType::bfloat16) value = float_from_bfloat(half);
                std::uint8_t* to = bytes.data() + 1 + static_cast<std::size_t>(row * stride + i) * size_of(dtype);
                dtype == DType::float32 ? std::memcpy(to, &value, 4) : std::memcpy(to, &half, 2);
                values[static_cast<std::size_t>(row * k + i)] = value;
            }
        }
        problem.m = m;
        problem.k = k;
        problem.dtype = dtype;
        problem.x = bytes.data() + 1;
        problem.x_row_stride = stride;
    }
};

void test_whole_matrices() {
    std::mt19937 random(3);
    constexpr std::uint8_t poison = 0xA5;
    constexpr std::size_t guard = 64;
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
        for (const auto& [m, k] : {std::pair<std::int64_t, std::int64_t>{1, 2}, {3, 14}, {130, 96}, {5, 178}, {2, 0}}) {
            const Activations x(random, m, k, dtype);
            const std::int64_t blocks = (k + 15) / 16;
            const auto code_bytes = static_cast<std::size_t>(m * k / 2);
            float amax = 0.0f;
            for (const float v : x.values) amax = std::max(amax, std::fabs(v));
            CHECK_EQ(cpu::dynamic_global_scale(x.problem, 3), act::global_scale_for(amax));
            for (const ScaleLayout layout : {ScaleLayout::plain, ScaleLayout::swizzled}) {
                const bool swizzled = layout == ScaleLayout::swizzled;
                const auto scale_bytes = static_cast<std::size_t>(swizzled ? swizzle::size(m, blocks) : m * blocks);
                std::vector<std::uint8_t> codes(code_bytes + guard, poison), scales(scale_bytes + guard, poison);
                cpu::quantize_activations(x.problem, 0.7f, layout, 2, codes.data(), scales.data());
                std::vector<std::uint8_t> plain(static_cast<std::size_t>(m * blocks));
                for (std::int64_t row = 0; row < m; ++row) {
                    for (std::int64_t c = 0; c < blocks; ++c) {
                        const int count = static_cast<int>(std::min<std::int64_t>(16, k - 16 * c));
                        const Wanted wanted = want(x.values.data() + row * k + 16 * c, count, 0.7f);
                        plain[static_cast<std::size_t>(row * blocks + c)] = wanted.scale;
                        for (int i = 0; i < count; ++i)
                            CHECK_EQ(int{e2m1_code(codes.data() + row * (k / 2), 16 * c + i)}, int{wanted.codes[i]});
                    }
                }
                std::vector<std::uint8_t> all = plain;
                if (swizzled) {
                    all.resize(scale_bytes);
                    swizzle::from_plain(plain.data(), m, blocks, all.data());
                }
                CHECK(std::equal(all.begin(), all.end(), scales.begin()));
                for (std::size_t i = 0; i < guard; ++i)
                    CHECK(codes[code_bytes + i] == poison && scales[scale_bytes + i] == poison);
            }
        }
    }
}

void test_emulated_path() {
    std::mt19937 random(4);
    for (const DType dtype : {DType::float16, DType::bfloat16, DType::float32}) {
        for (const auto& [n, k] : {std::pair<std::int64_t, std::int64_t>{1, 2}, {17, 64}, {33, 178}}) {
            const std::int64_t m = 67, blocks = (k + 15) / 16;
            Activations x(random, m, k, dtype);
            std::vector<std::uint8_t> b(static_cast<std::size_t>(n * k / 2)),
                bytes(static_cast<std::size_t>(n * blocks));
            for (std::uint8_t& byte : b) byte = static_cast<std::uint8_t>(random());
            for (std::uint8_t& byte : bytes)
                byte = static_cast<std::uint8_t>(0x20 + random() % 0x30 + (random() & 0x80));
            std::vector<float> scale2(static_cast<std::size_t>(n)), bias(static_cast<std::size_t>(n));
            for (float& f : scale2) f = random_float(random, -4, 1);
            for (float& f : bias) f = random_float(random, -4, 4);
            const cpu::Weight weight(n, k, 16, b.data(), bytes.data());
            const float g = 1.3f;
            const cpu::Epilogue epilogue{.scale2 = scale2.data(), .per_row = n > 1, .bias = bias.data()};
            std::vector<std::uint8_t> first;
            for (const int threads : {1, 3}) {
                const auto size = static_cast<std::size_t>(m * n) * size_of(dtype);
                std::vector<std::uint8_t> y(size + 64, 0xFF);
                Problem problem = x.problem;
                problem.n = n;
                problem.y = y.data();
                cpu::run_native_emulated(weight.view(), problem, epilogue, g, threads);
                for (std::size_t i = 0; i < 64; ++i) CHECK_EQ(int{y[size + i]}, 0xFF);
                if (first.empty()) first = y;
                CHECK(first == y);
            }
            for (std::int64_t row = 0; row < m; ++row) {
                for (std::int64_t column = 0; column < n; ++column) {
                    float sum = 0.0f;
                    for (std::int64_t c = 0; c < blocks; ++c) {
                        const int count = static_cast<int>(std::min<std::int64_t>(16, k - 16 * c));
                        const Wanted q = want(x.values.data() + row * k + 16 * c, count, g);
                        double dot = 0.0;
                        for (int i = 0; i < count; ++i)
                            dot += static_cast<double>(e2m1_values[q.codes[i]]) *
                                   float_from_e2m1(e2m1_code(b.data() + column * (k / 2), 16 * c + i));
                        sum += static_cast<float>(dot * e4m3_values[q.scale] *
                                                  e4m3_values[bytes[static_cast<std::size_t>(column * blocks + c)]]);
                    }
                    const auto at = static_cast<std::size_t>(column);
                    const auto rounded =
                        static_cast<float>(static_cast<double>(sum) * scale2[at] / static_cast<double>(g) + bias[at]);
                    const std::uint16_t half =
                        dtype == DType::float16 ? half_from_float(rounded) : bfloat_from_float(rounded);
                    const std::uint8_t* got =
                        first.data() + static_cast<std::size_t>(row * n + column) * size_of(dtype);
                    CHECK(std::memcmp(got, dtype == DType::float32 ? static_cast<const void*>(&rounded) : &half,
                                      size_of(dtype)) == 0);
                }
            }
        }
    }
}

}  // namespace

int main() {
    test_products_are_rounded_to_odd();
    test_scales_at_and_beside_every_midpoint();
    test_codes_at_and_beside_every_midpoint();
    test_random_blocks();
    test_special_values();
    test_dynamic_global_scale();
    test_whole_matrices();
    test_emulated_path();
    return check_report();
}
