// The arithmetic of the CUDA quantiser's kernel, run on the host: its table and its two values at a time against the
// plain rule of formats/activation.h.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "check.h"
#include "cuda/device/quantize_activations.cuh"
#include "formats/activation.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "formats/swizzle.h"

namespace {

using namespace fp4linear;
namespace act = fp4linear::activation;
namespace gpu = fp4linear::cuda::activations;

using Table = std::array<gpu::Thresholds, gpu::scale_count>;

template <class Pattern>
float value_of(std::uint32_t pattern) {
    const auto bits = static_cast<std::uint16_t>(pattern);
    return Pattern::infinity == gpu::Float16Pattern::infinity ? float_from_half(bits) : float_from_bfloat(bits);
}

template <class Pattern>
Table table_for(float g) {
    Table table{};
    for (int thread = 0; thread < 3; ++thread) gpu::fill_table<Pattern>(table.data(), g, thread, 3);
    return table;
}

act::Split split_of(float g) { return act::split(std::bit_cast<std::uint32_t>(g)); }

// Does the kernel's function give what the rule gives?
template <class Pattern>
bool block_agrees(const std::uint16_t (&x)[16], float g, const Table& table) {
    std::uint32_t bits[16], words[8];
    std::uint8_t codes[16];
    for (int i = 0; i < 16; ++i) bits[i] = std::bit_cast<std::uint32_t>(value_of<Pattern>(x[i]));
    std::memcpy(words, x, sizeof words);
    const std::uint8_t scale = act::quantize_block(bits, 16, split_of(g), codes);
    const gpu::QuantizedBlock got = gpu::quantize_block<Pattern>(words, g, table.data());
    bool same = got.scale == scale;
    for (int i = 0; i < 16; ++i) same = same && (got.codes[i / 8] >> 4 * (i % 8) & 0xFu) == codes[i];
    return same;
}

// Every pattern as the greatest magnitude of a block: each scale, NaN and infinities.
template <class Pattern>
void test_scales(float g, const Table& table) {
    long wrong = 0;
    for (std::uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
        const std::uint16_t x[16] = {static_cast<std::uint16_t>(pattern)};
        wrong += block_agrees<Pattern>(x, g, table) ? 0 : 1;
    }
    CHECK_EQ(wrong, 0);
}

// For each scale, every pattern that a block of it can hold, both signs.
template <class Pattern>
void test_codes(float g, const Table& table) {
    std::array<std::uint32_t, gpu::scale_count> greatest{};  // pattern with the scale
    for (std::uint32_t pattern = 1; pattern < Pattern::infinity; ++pattern)
        greatest[act::block_scale(
            act::product(std::bit_cast<std::uint32_t>(value_of<Pattern>(pattern)), split_of(g)))] = pattern;
    long wrong = 0, blocks = 0;
    for (const std::uint32_t amax : greatest) {
        for (std::uint32_t first = 0; amax != 0 && first <= amax; first += 15, ++blocks) {
            std::uint16_t x[16] = {static_cast<std::uint16_t>(amax)};
            for (std::uint32_t i = 0; i < 15; ++i)
                x[i + 1] = static_cast<std::uint16_t>(std::min(first + i, amax) | (i * 0x9E37u & 0x8000u));
            std::swap(x[0], x[first / 15 % 16]);
            wrong += block_agrees<Pattern>(x, g, table) ? 0 : 1;
        }
    }
    CHECK(blocks > 0);
    CHECK_EQ(wrong, 0);
}

// Blocks of any bits, and blocks of numbers of one size.
template <class Pattern>
void test_random_blocks(float g, const Table& table, std::mt19937& random, int count) {
    long wrong = 0;
    for (int n = 0; n < count; ++n) {
        std::uint16_t x[16];
        const std::uint32_t top = random() & 0x7FFFu, spread = random() % 15;
        for (auto& each : x) {
            const std::uint32_t lower = (random() & 0x7FFFu) >> spread;
            each = static_cast<std::uint16_t>((top > lower ? top - lower : 0) | (random() & 0x8000u));
            if (n % 16 == 0) each = static_cast<std::uint16_t>(random());
        }
        wrong += block_agrees<Pattern>(x, g, table) ? 0 : 1;
    }
    CHECK_EQ(wrong, 0);
}

// A g for which some x * g lies on a midpoint times a scale, or one step of fp32 beside it.
template <class Pattern>
float adverse_scale(std::mt19937& random) {
    constexpr float middles[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    for (;;) {
        const float x = value_of<Pattern>(random() % (Pattern::infinity - 1) + 1);
        float target = middles[random() % 7] * e4m3_values[random() % 126 + 1];
        if (random() % 4 == 0) {
            const std::uint32_t scale = random() % 126;
            target = 3 * (e4m3_values[scale] + e4m3_values[scale + 1]);
        }
        float g = target / x;
        if (!(g > 0.0f) || !std::isfinite(g)) continue;
        const std::uint32_t kind = random() % 3;
        if (kind != 0) g = std::nextafter(g, kind == 1 ? 0.0f : std::numeric_limits<float>::infinity());
        if (g > 0.0f && std::isfinite(g)) return g;
    }
}

float any_scale(std::mt19937& random) {
    for (;;) {
        const float g = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7FFFFFFFu);
        if (g > 0.0f && std::isfinite(g)) return g;
    }
}

template <class Pattern>
void test_pattern(std::uint32_t seed) {
    std::mt19937 random(seed);
    constexpr float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
    for (const float g : {1.0f, 2688.0f / 3.7f}) test_codes<Pattern>(g, table_for<Pattern>(g));
    const float odd = adverse_scale<Pattern>(random);
    test_codes<Pattern>(odd, table_for<Pattern>(odd));
    for (const float g : {1.0f, 0.5f, 448.0f, 2688.0f, 1.0f / 3, 0x1p-126f, 0x1p-100f, 0x1p100f, least, most})
        test_scales<Pattern>(g, table_for<Pattern>(g));
    for (int i = 0; i < 400; ++i) {
        const float g = i % 4 == 0 ? any_scale(random) : adverse_scale<Pattern>(random);
        const Table table = table_for<Pattern>(g);
        if (i % 20 == 0) test_scales<Pattern>(g, table);
        test_random_blocks<Pattern>(g, table, random, 500);
    }
}

// The table says what the rule says, on both sides of each of its patterns.
template <class Pattern>
void test_table(std::uint32_t seed) {
    std::mt19937 random(seed);
    long wrong = 0;
    for (int round = 0; round < 300; ++round) {
        const float g = round % 2 == 0 ? any_scale(random) : adverse_scale<Pattern>(random);
        const act::Split split = split_of(g);
        for (std::uint32_t scale = 1; scale < gpu::scale_count; ++scale) {
            const act::Midpoints middle = act::midpoints(static_cast<std::uint8_t>(scale));
            for (int code = 1; code <= gpu::midpoint_count; ++code) {
                const std::uint32_t least = gpu::threshold<Pattern>(scale, code - 1, g, gpu::Reciprocal(g));
                for (const std::uint32_t pattern : {least - 1, least}) {
                    if (pattern >= Pattern::infinity) continue;
                    const auto bits = std::bit_cast<std::uint32_t>(value_of<Pattern>(pattern));
                    const bool reached = act::code(bits, act::product(bits, split), middle) >= code;
                    wrong += reached == (pattern == least) ? 0 : 1;
                }
            }
        }
    }
    CHECK_EQ(wrong, 0);
}

template <class Pattern>
void test_greatest_finite() {
    long wrong = 0;
    gpu::GreatestFinite<Pattern> all;
    for (std::uint32_t low = 0; low < 0x10000; ++low) {
        const std::uint32_t other = low * 0x9E37u & 0xFFFFu;
        const auto finite = [&](std::uint32_t p) { return (p & 0x7FFFu) < Pattern::infinity ? p & 0x7FFFu : 0u; };
        gpu::GreatestFinite<Pattern> both;
        both.take(other << 16 | low);
        wrong += both.pattern() == std::max(finite(other), finite(low)) ? 0 : 1;
        both.take(0x00120034);
        wrong += both.pattern() == std::max({finite(other), finite(low), 0x34u}) ? 0 : 1;
        all.take(low);
    }
    CHECK_EQ(wrong, 0);
    CHECK_EQ(all.pattern(), Pattern::infinity - 1);
}

// fp32: blocks of any bits, of numbers of one size, and of numbers whose product with g lies on a midpoint times a
// scale or one step of fp32 beside it.
void test_singles(std::uint32_t seed) {
    std::mt19937 random(seed);
    const Table table = table_for<gpu::BFloat16Pattern>(1.0f);
    constexpr float middles[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    constexpr float least = std::numeric_limits<float>::denorm_min(), most = std::numeric_limits<float>::max();
    const std::vector<float> special = {1.0f,      0.5f,      448.0f,   2688.0f, 1.0f / 3,
                                        0x1p-126f, 0x1p-100f, 0x1p100f, least,   most};
    long wrong = 0;
    for (int round = 0; round < 1200; ++round) {
        const float g = static_cast<std::size_t>(round) < special.size() ? special[static_cast<std::size_t>(round)]
                        : round % 3 == 0 ? std::ldexp(1.0f, static_cast<int>(random() % 20) - 10)
                                         : any_scale(random);
        for (int n = 0; n < 500; ++n) {
            std::uint32_t x[16], words[8];
            std::uint8_t codes[16];
            const float scale = e4m3_values[random() % 126 + 1];
            const std::uint32_t top = random() & 0x7FFFFFFFu, spread = random() % 31;
            for (int i = 0; i < 16; ++i) {
                if (n % 4 == 0) {
                    x[i] = static_cast<std::uint32_t>(random());
                } else if (n % 4 == 1) {
                    const std::uint32_t lower = (random() & 0x7FFFFFFFu) >> spread;
                    x[i] = (top > lower ? top - lower : 0) | (random() & 0x80000000u);
                } else {
                    const float middle = i == 0 && n % 8 < 6 ? 6.0f : middles[random() % 7];
                    x[i] = std::bit_cast<std::uint32_t>(middle * scale / g) + static_cast<std::uint32_t>(random() % 3) -
                           1u;
                    if (i == 0 && n % 16 == 3) {  // the midpoint of two scales
                        const std::uint32_t below = random() % 126;
                        x[i] = std::bit_cast<std::uint32_t>(3 * (e4m3_values[below] + e4m3_values[below + 1]) / g) +
                               static_cast<std::uint32_t>(random() % 3) - 1u;
                    }
                    x[i] ^= random() & 0x80000000u;
                }
            }
            for (int i = 0; i < 8; ++i) words[i] = gpu::odd_products(x[2 * i], x[2 * i + 1], g);
            const std::uint8_t want = act::quantize_block(x, 16, split_of(g), codes);
            const gpu::QuantizedBlock got = gpu::quantize_block<gpu::BFloat16Pattern>(words, 1.0f, table.data());
            bool same = got.scale == want;
            for (int i = 0; i < 16; ++i) same = same && (got.codes[i / 8] >> 4 * (i % 8) & 0xFu) == codes[i];
            wrong += same ? 0 : 1;
        }
    }
    CHECK_EQ(wrong, 0);
}

// Memory that does not start at a multiple of what moves it.
void test_shifts() {
    std::mt19937 random(6);
    std::array<std::uint32_t, 20> pieces{};
    for (auto& each : pieces) each = static_cast<std::uint32_t>(random());
    const auto check = [&]<int count>(std::integral_constant<int, count>) {
        std::uint32_t from[count + 4], words[count], want[count];
        std::memcpy(from, pieces.data(), sizeof from);
        for (std::uint32_t shift = 0; shift < 16; ++shift) {
            gpu::words_from(from, shift, words);
            std::memcpy(want, reinterpret_cast<const std::uint8_t*>(from) + shift, sizeof want);
            CHECK_EQ(std::memcmp(words, want, sizeof want), 0);
        }
    };
    check(std::integral_constant<int, 8>());
    check(std::integral_constant<int, 16>());
    for (std::uint32_t shift = 1; shift < 8; ++shift) {
        const gpu::CodeWords words = gpu::shifted_codes({{pieces[0], pieces[1]}}, {{pieces[2], pieces[3]}}, shift);
        CHECK_EQ(std::memcmp(&words, reinterpret_cast<const std::uint8_t*>(pieces.data()) + 8 - shift, 8), 0);
    }
}

void test_atoms() {
    long wrong = 0;
    for (const std::uint32_t columns : {1u, 3u, 64u}) {
        const std::int64_t blocks = 4 * columns;
        for (std::uint32_t row = 0; row < 300; ++row)
            for (std::uint32_t block = 0; block < blocks; ++block) {
                const auto want = static_cast<std::uint64_t>(swizzle::offset(row, block, blocks));
                const gpu::AtomPlace place(static_cast<std::uint32_t>(want % swizzle::atom_bytes));
                wrong += gpu::swizzled_offset(row, block, columns) != want;
                wrong += place.row != row % swizzle::atom_rows || place.block != block % swizzle::atom_blocks;
            }
    }
    CHECK_EQ(wrong, 0);
}

void test_divider() {
    std::mt19937 random(5);
    long wrong = 0;
    for (int i = 0; i < 200000; ++i) {
        const std::uint32_t by = i < 3000 ? static_cast<std::uint32_t>(i + 1) : (random() >> (random() % 31 + 1)) + 1;
        const gpu::Divider divider(by);
        const std::uint32_t any = random() >> 1, multiple = any / by * by;
        for (const std::uint32_t n : {0u, any, multiple, multiple == 0 ? 0u : multiple - 1, 0x7FFFFFFFu})
            wrong += divider.quotient(n) == n / by ? 0 : 1;
    }
    CHECK_EQ(wrong, 0);
}

}  // namespace

int main() {
    test_greatest_finite<gpu::Float16Pattern>();
    test_greatest_finite<gpu::BFloat16Pattern>();
    test_shifts();
    test_atoms();
    test_divider();
    test_table<gpu::Float16Pattern>(1);
    test_table<gpu::BFloat16Pattern>(2);
    test_pattern<gpu::Float16Pattern>(3);
    test_pattern<gpu::BFloat16Pattern>(4);
    test_singles(7);
    return check_report();
}
