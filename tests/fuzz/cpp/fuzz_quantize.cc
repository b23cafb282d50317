// Any finite weight: codes and scales that the formats have, the nearest ones, and no worse than what max_abs gives.
#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "input.h"

namespace {

using namespace fp4linear;

struct Made {
    std::vector<std::uint8_t> b, scales;
    double squared_error = 0;
};

Made made(std::int64_t n, std::int64_t k, const std::vector<float>& w, QuantizeMethod method, float scale2) {
    const std::int64_t blocks = (k + 15) / 16;
    Made result{std::vector<std::uint8_t>(static_cast<std::size_t>(n * k / 2), 0xAA),
                std::vector<std::uint8_t>(static_cast<std::size_t>(n * blocks), 0xFF), 0};
    quantize(n, k, w.data(), method, scale2, result.b.data(), result.scales.data());
    for (std::int64_t r = 0; r < n; ++r) {
        for (std::int64_t i = 0; i < k; ++i) {
            const std::uint8_t scale = result.scales[static_cast<std::size_t>(r * blocks + i / 16)];
            REQUIRE(scale <= 0x7E);
            const int code = e2m1_code(result.b.data() + r * k / 2, i);
            const double value = w[static_cast<std::size_t>(r * k + i)];
            const double step = static_cast<double>(e4m3_values[scale]) * scale2;
            const double error = std::fabs(value - step * e2m1_values[static_cast<std::size_t>(code)]);
            for (const double other : e2m1_values) REQUIRE(error <= std::fabs(value - step * other) * (1 + 1e-12));
            result.squared_error += error * error;
        }
    }
    return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    setenv("FP4LINEAR_NUM_THREADS", "2", 1);
    Input input(data, size);
    const std::int64_t n = input.from(0, 5), k = 2 * input.from(0, 30);
    const auto method = static_cast<QuantizeMethod>(input.from(0, 2));
    const std::uint32_t base = input.word();
    const bool alike = input.flag(), own = input.flag();
    std::vector<float> w(static_cast<std::size_t>(n * k));
    float amax = 0;
    for (float& value : w) {
        value = std::bit_cast<float>(alike ? base ^ (input.word() & 0x83FFFFFFu) : input.word());
        if (!std::isfinite(value)) value = 1.0f;
        amax = std::max(amax, std::fabs(value));
    }
    float scale2 = global_scale(amax, method);
    REQUIRE(scale2 > 0 && std::isfinite(scale2));
    if (own) {
        const float given = input.number();
        if (std::isfinite(given) && given != 0.0f) scale2 = given;
    }
    const Made wanted = made(n, k, w, method, scale2), simple = made(n, k, w, QuantizeMethod::max_abs, scale2);
    REQUIRE(!(wanted.squared_error > simple.squared_error * (1 + 1e-9)));
    return 0;
}
