// The number formats alone, each against a rule that shares nothing with its implementation: value tables
// from the bit fields, nearest-neighbour searches, the compiler's own half type, a reshape for the swizzle.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "check.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "formats/swizzle.h"
#include "nearest.h"

namespace {

using namespace fp4linear;

constexpr double power_of_two(int exponent) {
    double value = 1.0;
    for (; exponent > 0; --exponent) value *= 2.0;
    for (; exponent < 0; ++exponent) value *= 0.5;
    return value;
}

// A small float from its fields, as the OCP specifications define them.
constexpr double value_of_fields(int exponent, int mantissa, int mantissa_bits, int bias) {
    const double fraction = mantissa * power_of_two(-mantissa_bits);
    return exponent == 0 ? fraction * power_of_two(1 - bias) : (1.0 + fraction) * power_of_two(exponent - bias);
}

constexpr bool same_bits(float a, float b) {
    return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

constexpr bool e2m1_table_is_right() {
    for (int code = 0; code < 16; ++code) {
        const auto magnitude = static_cast<float>(value_of_fields((code >> 1) & 3, code & 1, 1, 1));
        if (!same_bits(float_from_e2m1(static_cast<std::uint8_t>(code)), code & 8 ? -magnitude : magnitude))
            return false;
    }
    return true;
}
static_assert(e2m1_table_is_right());
static_assert(float_from_e2m1(7) == 6.0f && float_from_e2m1(15) == -6.0f && float_from_e2m1(2) == 1.0f);

constexpr bool e4m3_table_is_right() {
    for (int byte = 0; byte < 256; ++byte) {
        const float got = float_from_e4m3(static_cast<std::uint8_t>(byte));
        const bool nan = (byte & 0x7F) == 0x7F;
        if (is_e4m3_nan(static_cast<std::uint8_t>(byte)) != nan || (got != got) != nan) return false;
        const auto magnitude = static_cast<float>(value_of_fields((byte >> 3) & 15, byte & 7, 3, 7));
        if (!nan && !same_bits(got, byte & 0x80 ? -magnitude : magnitude)) return false;
        if (!nan && !same_bits(got, e4m3_values[static_cast<std::size_t>(byte)])) return false;
    }
    return true;
}
static_assert(e4m3_table_is_right());
static_assert(float_from_e4m3(0x38) == 1.0f && float_from_e4m3(0x7E) == 448.0f && float_from_e4m3(0x01) == 0x1p-9f);

constexpr bool every_code_survives() {
    for (int code = 0; code < 16; ++code)
        if (e2m1_from_float(float_from_e2m1(static_cast<std::uint8_t>(code))) != code) return false;
    for (int byte = 0; byte < 256; ++byte) {
        const auto code = static_cast<std::uint8_t>(byte);
        if (!is_e4m3_nan(code) && e4m3_from_float(float_from_e4m3(code)) != code) return false;
    }
    return true;
}
static_assert(every_code_survives());

constexpr bool product_is_exact_in_16_bits() {
    for (int code = 0; code < 16; ++code)
        for (int byte = 0; byte < 256; ++byte) {
            if (is_e4m3_nan(static_cast<std::uint8_t>(byte))) continue;
            const float product =
                float_from_e2m1(static_cast<std::uint8_t>(code)) * float_from_e4m3(static_cast<std::uint8_t>(byte));
            if (!same_bits(float_from_half(half_from_float(product)), product)) return false;
            if (!same_bits(float_from_bfloat(bfloat_from_float(product)), product)) return false;
        }
    return true;
}
static_assert(product_is_exact_in_16_bits());

static_assert(pack_e2m1(0x3, 0xA) == 0xA3);
constexpr std::uint8_t packed_row[] = {0x10, 0x32, 0xFE};
static_assert(e2m1_code(packed_row, 0) == 0 && e2m1_code(packed_row, 1) == 1 && e2m1_code(packed_row, 2) == 2);
static_assert(e2m1_code(packed_row, 3) == 3 && e2m1_code(packed_row, 4) == 0xE && e2m1_code(packed_row, 5) == 0xF);

// Floats that matter to any rounding of the upper bits: every upper half, with lower halves on, beside and
// between the ties.
template <class Body>
void for_telling_floats(Body body) {
    for (std::uint32_t upper = 0; upper < 0x10000; ++upper)
        for (const std::uint32_t lower :
             {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
            body(std::bit_cast<float>(upper << 16 | lower));
}

void test_e2m1_from_float() {
    long wrong = 0;
    for_telling_floats([&](float value) {
        if (std::isnan(value)) return;
        const int magnitude = nearest_code(std::min(std::fabs(static_cast<double>(value)), 1e9), 7,
                                           [](int code) { return value_of_fields(code >> 1, code & 1, 1, 1); });
        wrong += e2m1_from_float(value) != (magnitude | (std::signbit(value) ? 8 : 0));
    });
    CHECK_EQ(wrong, 0L);
    CHECK_EQ(int(e2m1_from_float(0.25f)), 0);
    CHECK_EQ(int(e2m1_from_float(0.75f)), 2);
    CHECK_EQ(int(e2m1_from_float(-2.5f)), 8 | 4);
    CHECK_EQ(int(e2m1_from_float(5.0f)), 6);
    CHECK_EQ(int(e2m1_from_float(-0.0f)), 8);
    CHECK_EQ(int(e2m1_from_float(INFINITY)), 7);
    CHECK_EQ(int(e2m1_from_float(std::nanf("")) & 7), 7);
}

void test_e4m3_from_float() {
    long wrong = 0;
    for_telling_floats([&](float value) {
        const int sign = std::signbit(value) ? 0x80 : 0;
        if (std::isnan(value)) {
            wrong += e4m3_from_float(value) != (sign | 0x7F);
            return;
        }
        // 0x7E is the greatest finite code, so a search that stops there saturates.
        const int magnitude = nearest_code(std::min(std::fabs(static_cast<double>(value)), 1e9), 0x7E,
                                           [](int code) { return value_of_fields(code >> 3, code & 7, 3, 7); });
        wrong += e4m3_from_float(value) != (magnitude | sign);
    });
    CHECK_EQ(wrong, 0L);
    // The ties themselves, which need more bits than the sweep's lower halves in no case, and their neighbours.
    for (int code = 0; code < 0x7E; ++code) {
        const float tie =
            (float_from_e4m3(static_cast<std::uint8_t>(code)) + float_from_e4m3(static_cast<std::uint8_t>(code + 1))) *
            0.5f;
        CHECK_EQ(int(e4m3_from_float(tie)), code + code % 2);
        CHECK_EQ(int(e4m3_from_float(std::nextafter(tie, 0.0f))), code);
        CHECK_EQ(int(e4m3_from_float(std::nextafter(tie, 1e9f))), code + 1);
    }
}

void test_half() {
#ifdef __FLT16_MAX__
    long wrong = 0;
    for (std::uint32_t h = 0; h < 0x10000; ++h) {
        const auto bits = static_cast<std::uint16_t>(h);
        const auto want = static_cast<float>(std::bit_cast<_Float16>(bits));
        const float got = float_from_half(bits);
        wrong += std::isnan(want) ? !std::isnan(got) : !same_bits(got, want);
        if (!std::isnan(want)) wrong += half_from_float(got) != bits;
    }
    CHECK_EQ(wrong, 0L);
    const auto check = [&](float value) {
        const std::uint16_t got = half_from_float(value);
        if (std::isnan(value)) {
            wrong += (got & 0x7C00) != 0x7C00 || (got & 0x3FF) == 0;
        } else {
            wrong += got != std::bit_cast<std::uint16_t>(static_cast<_Float16>(value));
        }
    };
    for_telling_floats(check);
    CHECK_EQ(wrong, 0L);
    // Every tie between neighbouring halves, and the floats beside it.
    for (std::uint32_t h = 0; h < 0x7C00; ++h) {
        const float low = float_from_half(static_cast<std::uint16_t>(h));
        const float high = h == 0x7BFF ? 65536.0f : float_from_half(static_cast<std::uint16_t>(h + 1));
        const float tie = low + (high - low) * 0.5f;
        for (const float value : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f)}) {
            check(value);
            check(-value);
        }
    }
    CHECK_EQ(wrong, 0L);
    std::mt19937 random(1);
    for (int i = 0; i < 1'000'000; ++i) check(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    CHECK_EQ(wrong, 0L);
#endif
    CHECK_EQ(int(half_from_float(65519.996f)), 0x7BFF);
    CHECK_EQ(int(half_from_float(65520.0f)), 0x7C00);
    CHECK_EQ(int(half_from_float(0x1p-24f)), 1);
    CHECK_EQ(int(half_from_float(0x1p-25f)), 0);
    CHECK_EQ(int(half_from_float(-0x1.000002p-25f)), 0x8001);
}

void test_bfloat() {
    long wrong = 0;
    for (std::uint32_t b = 0; b < 0x10000; ++b) {
        const float value = float_from_bfloat(static_cast<std::uint16_t>(b));
        wrong += std::bit_cast<std::uint32_t>(value) != b << 16;
        if (!std::isnan(value)) wrong += bfloat_from_float(value) != b;
    }
    CHECK_EQ(wrong, 0L);
    const auto check = [&](float value) {
        const std::uint16_t got = bfloat_from_float(value);
        if (std::isnan(value)) {
            wrong += (got & 0x7F80) != 0x7F80 || (got & 0x7F) == 0;
            return;
        }
        const auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
        if (std::isinf(value)) {
            wrong += got != below;
            return;
        }
        // Neighbours in double; the one above the greatest finite value counts as 2^128.
        const double low = std::fabs(static_cast<double>(float_from_bfloat(below)));
        const double high =
            (below & 0x7FFF) == 0x7F7F ? 0x1p128 : std::fabs(static_cast<double>(float_from_bfloat(below + 1)));
        const double to_low = std::fabs(static_cast<double>(value)) - low;
        const double to_high = high - std::fabs(static_cast<double>(value));
        const bool up = to_high < to_low || (to_high == to_low && below % 2 == 1);
        wrong += got != static_cast<std::uint16_t>(below + (up ? 1 : 0));
    };
    for_telling_floats(check);
    std::mt19937 random(2);
    for (int i = 0; i < 1'000'000; ++i) check(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    CHECK_EQ(wrong, 0L);
}

void test_swizzle() {
    static_assert(swizzle::size(1, 1) == 512 && swizzle::size(129, 5) == 4 * 512 && swizzle::size(0, 4) == 0);
    static_assert(swizzle::offset(0, 3, 8) == 3 && swizzle::offset(1, 0, 8) == 16 && swizzle::offset(32, 0, 8) == 4);
    static_assert(swizzle::offset(0, 4, 8) == 512 && swizzle::offset(128, 0, 8) == 1024);

    std::mt19937 random(3);
    for (const auto& [rows, blocks] : std::vector<std::pair<std::int64_t, std::int64_t>>{{1, 1},
                                                                                         {1, 4},
                                                                                         {5, 3},
                                                                                         {31, 7},
                                                                                         {32, 4},
                                                                                         {127, 1},
                                                                                         {128, 4},
                                                                                         {129, 5},
                                                                                         {160, 6},
                                                                                         {256, 8},
                                                                                         {300, 13},
                                                                                         {0, 3},
                                                                                         {3, 0}}) {
        const std::int64_t size = swizzle::size(rows, blocks);
        std::vector<std::uint8_t> plain(static_cast<std::size_t>(rows * blocks)), back(plain.size(), 0xAA);
        for (auto& byte : plain) byte = static_cast<std::uint8_t>(1 + random() % 255);  // 0 marks padding
        std::vector<std::uint8_t> swizzled(static_cast<std::size_t>(size), 0xCC);
        swizzle::from_plain(plain.data(), rows, blocks, swizzled.data());

        // The same layout said as a walk through the atoms in memory order: for each atom, 32 row residues,
        // then 4 groups of 32 rows, then 4 blocks. The offset of what is met is just the count so far.
        const std::int64_t row_atoms = (rows + 127) / 128, block_atoms = (blocks + 3) / 4;
        std::int64_t at = 0;
        long wrong = 0;
        for (std::int64_t ra = 0; ra < row_atoms; ++ra)
            for (std::int64_t ba = 0; ba < block_atoms; ++ba)
                for (int residue = 0; residue < 32; ++residue)
                    for (int group = 0; group < 4; ++group)
                        for (int column = 0; column < 4; ++column, ++at) {
                            const std::int64_t row = ra * 128 + group * 32 + residue, block = ba * 4 + column;
                            const bool inside = row < rows && block < blocks;
                            const std::uint8_t want =
                                inside ? plain[static_cast<std::size_t>(row * blocks + block)] : std::uint8_t{0};
                            wrong += swizzled[static_cast<std::size_t>(at)] != want;
                            if (inside) wrong += swizzle::offset(row, block, blocks) != at;
                        }
        CHECK_EQ(at, size);
        CHECK_EQ(wrong, 0L);
        swizzle::to_plain(swizzled.data(), rows, blocks, back.data());
        CHECK(back == plain);
    }
}

}  // namespace

int main() {
    test_e2m1_from_float();
    test_e4m3_from_float();
    test_half();
    test_bfloat();
    test_swizzle();
    return check_report();
}
