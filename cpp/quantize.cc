#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/cpu.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "problem.h"

namespace fp4linear {
namespace {

constexpr int block_size = 16;
constexpr float greatest_e2m1 = 6.0f;
constexpr float greatest_e4m3 = 448.0f;
constexpr float greatest_e4m3_four_over_six = 256.0f;  // 256 * 6/4 = 384 is an E4M3 value; 448 * 6/4 is beyond it

// The E4M3 codes of positive finite values are in order, so a search over scales is one over bytes. Halving or doubling
// a scale moves its code by 8, one exponent step: no better scale of a block lies further from the max-abs one than
// that, since half of a scale that is more than twice as large gives the same values. But the half has to be a number
// of E4M3: those of the odd codes below 16 are not.
constexpr int search_codes = 8;
constexpr int last_without_half = 15;

struct Coded {
    std::uint8_t codes[block_size];
    double squared_error;
};

// The nearest code of each value, ties to even. The codes are counted up over the midpoints between them, and the
// values over the gaps, so that the loop has no branch and no table: the mse search runs it 17 times a block.
Coded encode(const float* w, int count, std::uint8_t scale_byte, float scale2) {
    Coded result{};
    // In fp64 the product and the quotient are as good as exact, so each code is the nearest one.
    const double step = static_cast<double>(e4m3_values[scale_byte]) * scale2;
    const double inverse = step == 0.0 ? 0.0 : 1.0 / step;
    for (int i = 0; i < count; ++i) {
        const double quotient = w[i] * inverse;
        const double q = std::fabs(quotient);
        const int above_quarter = q > 0.25, above_three_quarters = q >= 0.75, above_5_4 = q > 1.25,
                  above_7_4 = q >= 1.75;
        const int above_5_2 = q > 2.5, above_7_2 = q >= 3.5, above_5 = q > 5.0;
        const int small = above_quarter + above_three_quarters + above_5_4 + above_7_4;
        const double magnitude = 0.5 * small + (above_5_2 + above_7_2) + 2.0 * above_5;
        const double error = std::fabs(static_cast<double>(w[i])) - magnitude * std::fabs(step);
        const int sign = quotient < 0.0 || (quotient == 0.0 && std::signbit(w[i])) ? 8 : 0;
        result.codes[i] = static_cast<std::uint8_t>(sign | (small + above_5_2 + above_7_2 + above_5));
        result.squared_error += error * error;
    }
    return result;
}

std::uint8_t scale_for(float amax, float greatest_code, float scale2) {
    return e4m3_from_float(
        static_cast<float>(static_cast<double>(amax) / (static_cast<double>(greatest_code) * std::fabs(scale2))));
}

struct Block {
    std::uint8_t scale;
    Coded coded;
};

void take_if_better(Block& best, const float* w, int count, int scale_byte, float scale2) {
    const auto byte = static_cast<std::uint8_t>(scale_byte);
    const Coded coded = encode(w, count, byte, scale2);
    if (coded.squared_error < best.coded.squared_error) best = {byte, coded};
}

Block quantize_block(const float* w, int count, QuantizeMethod method, float scale2) {
    float amax = 0.0f;
    for (int i = 0; i < count; ++i) amax = std::max(amax, std::fabs(w[i]));
    Block best{scale_for(amax, greatest_e2m1, scale2), {}};
    best.coded = encode(w, count, best.scale, scale2);
    if (method == QuantizeMethod::four_over_six) {
        take_if_better(best, w, count, scale_for(amax, 4.0f, scale2), scale2);
    } else if (method == QuantizeMethod::mse) {
        const int centre = best.scale;
        const int last = std::min(0x7E, std::max(last_without_half, centre + search_codes));
        for (int byte = std::max(0, centre - search_codes); byte <= last; ++byte)
            take_if_better(best, w, count, byte, scale2);
    }
    return best;
}

}  // namespace

float global_scale(float amax, QuantizeMethod method) {
    if (amax == 0.0f) return 1.0f;
    const float greatest = method == QuantizeMethod::four_over_six ? greatest_e4m3_four_over_six : greatest_e4m3;
    const float scale2 = amax / (greatest_e2m1 * greatest);
    // A tensor of values near the least fp32 numbers: keep the factor above 0.
    return std::max(scale2, std::numeric_limits<float>::denorm_min());
}

void quantize(std::int64_t n, std::int64_t k, const float* w, QuantizeMethod method, float scale2, std::uint8_t* b,
              std::uint8_t* scales) {
    struct Context {
        std::int64_t k;
        const float* w;
        QuantizeMethod method;
        float scale2;
        std::uint8_t *b, *scales;
    } context{k, w, method, scale2, b, scales};
    const auto rows = [](void* opaque, std::int64_t begin, std::int64_t end) {
        const Context& c = *static_cast<const Context*>(opaque);
        const std::int64_t row_blocks = blocks_per_row(c.k, block_size);
        for (std::int64_t r = begin; r < end; ++r) {
            for (std::int64_t block = 0; block < row_blocks; ++block) {
                const std::int64_t first = block * block_size;
                const int count = static_cast<int>(std::min<std::int64_t>(block_size, c.k - first));
                const Block q = quantize_block(c.w + r * c.k + first, count, c.method, c.scale2);
                c.scales[r * row_blocks + block] = q.scale;
                std::uint8_t* out = c.b + (r * c.k + first) / 2;
                for (int i = 0; i < count; i += 2) out[i / 2] = pack_e2m1(q.coded.codes[i], q.coded.codes[i + 1]);
            }
        }
    };
    cpu::parallel_for(n, cpu::default_threads(), rows, &context);
}

}  // namespace fp4linear
