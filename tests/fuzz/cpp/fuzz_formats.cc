// Every conversion against a search of its whole table in fp64, and the swizzle against its own inverse.
#include <algorithm>
#include <cmath>
#include <vector>

#include "formats/activation.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "formats/swizzle.h"
#include "input.h"
#include "tests/cpp/nearest.h"

namespace {

using namespace fp4linear;

constexpr double beyond = 1e6;  // above all of E4M3 and E2M1, and small enough to subtract from exactly enough

int nearest_e4m3(double magnitude) {
    return nearest_code(magnitude, 0x7E, [](int code) { return e4m3_values[static_cast<std::size_t>(code)]; });
}
int nearest_e2m1(double magnitude) {
    return nearest_code(magnitude, 7, [](int code) { return e2m1_values[static_cast<std::size_t>(code)]; });
}

void conversions(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const int e4m3 = e4m3_from_float(value), e2m1 = e2m1_from_float(value);
    REQUIRE((e4m3 >> 7) == static_cast<int>(bits >> 31) && (e2m1 >> 3) == static_cast<int>(bits >> 31));
    const std::uint16_t half = half_from_float(value), bfloat = bfloat_from_float(value);
    if (std::isnan(value)) {
        REQUIRE((e4m3 & 0x7F) == 0x7F && (e2m1 & 7) == 7);
        REQUIRE(std::isnan(float_from_half(half)) && std::isnan(float_from_bfloat(bfloat)));
        return;
    }
    const double magnitude = std::min(std::fabs(static_cast<double>(value)), beyond);
    REQUIRE((e4m3 & 0x7F) == nearest_e4m3(magnitude) && (e2m1 & 7) == nearest_e2m1(magnitude));
    const auto beside = [&](std::uint16_t code, std::uint16_t infinity, auto from, double at_infinity) {
        const auto plain = static_cast<std::uint16_t>(code & 0x7FFF);
        REQUIRE(plain <= infinity);
        const auto distance = [&](int other) {
            const double v = other == infinity ? at_infinity : from(static_cast<std::uint16_t>(other));
            return std::fabs(v - std::fabs(static_cast<double>(value)));
        };
        if (std::isinf(value)) return REQUIRE(plain == infinity);
        for (const int other : {plain - 1, plain + 1}) {
            if (other < 0 || other > infinity) continue;
            REQUIRE(distance(plain) < distance(other) || (distance(plain) == distance(other) && plain % 2 == 0));
        }
    };
    beside(half, 0x7C00, [](std::uint16_t c) { return static_cast<double>(float_from_half(c)); }, 65536.0);
    beside(bfloat, 0x7F80, [](std::uint16_t c) { return static_cast<double>(float_from_bfloat(c)); }, 0x1p128);
    REQUIRE(half_from_float(float_from_half(half)) == half && bfloat_from_float(float_from_bfloat(bfloat)) == bfloat);
}

void activations(Input& input) {
    float g = std::fabs(input.number());
    if (!(g > 0) || !std::isfinite(g)) g = 1.0f;
    const int count = input.from(1, 16);
    std::uint32_t x[16];
    std::uint8_t codes[16];
    float amax = 0;
    bool finite = true;
    // Of one magnitude and near it, as the values of a block are, or any.
    const std::uint32_t base = input.word();
    const bool alike = input.flag();
    for (int i = 0; i < count; ++i) {
        x[i] = alike ? base ^ (input.word() & 0x80FFFFFFu) : input.word();
        finite = finite && (x[i] & activation::magnitude_bits) < activation::infinity_bits;
        if (finite) amax = std::max(amax, std::fabs(std::bit_cast<float>(x[i])));
    }
    const std::uint8_t scale =
        activation::quantize_block(x, count, activation::split(std::bit_cast<std::uint32_t>(g)), codes);
    if (!finite) return REQUIRE(scale == activation::nan_scale);
    // 48 bits: exact in fp64. Six times a value or a midpoint of the table is exact as well.
    const double product = std::min(static_cast<double>(amax) * g, beyond);
    const int wanted =
        nearest_code(product, 0x7E, [](int code) { return 6.0 * e4m3_values[static_cast<std::size_t>(code)]; });
    REQUIRE(scale == wanted);
    for (int i = 0; i < count; ++i) {
        const double value = std::min(std::fabs(static_cast<double>(std::bit_cast<float>(x[i]))) * g, beyond);
        const double step = e4m3_values[scale];
        const int code =
            scale == 0 ? 0
                       : nearest_code(value, 7, [&](int c) { return step * e2m1_values[static_cast<std::size_t>(c)]; });
        REQUIRE((codes[i] & 7) == code && codes[i] < 16);
        if (scale != 0) REQUIRE((codes[i] >> 3) == static_cast<int>(x[i] >> 31));
    }
    const float fitting = activation::global_scale_for(amax);
    REQUIRE(fitting > 0 && std::isfinite(fitting));
}

void swizzled(Input& input) {
    const std::int64_t rows = input.from(0, 255), blocks = input.from(0, 40);
    const std::vector<std::uint8_t> plain = input.bytes(static_cast<std::size_t>(rows * blocks));
    // One byte too many on both sides would be seen by AddressSanitizer.
    std::vector<std::uint8_t> there(static_cast<std::size_t>(swizzle::size(rows, blocks)), 0xAA), back(plain.size());
    swizzle::from_plain(plain.data(), rows, blocks, there.data());
    swizzle::to_plain(there.data(), rows, blocks, back.data());
    REQUIRE(back == plain);
    REQUIRE(std::count(there.begin(), there.end(), 0) >=
            static_cast<std::ptrdiff_t>(there.size()) - static_cast<std::ptrdiff_t>(plain.size()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Input input(data, size);
    switch (input.byte() % 3) {
        case 0:
            for (int i = 0; i < 16; ++i) conversions(input.number());
            break;
        case 1: activations(input); break;
        default: swizzled(input);
    }
    return 0;
}
