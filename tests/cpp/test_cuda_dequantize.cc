// The CUDA backend's dequantisation against the host's formats, bit for bit; without a device, that the backend says
// why there is none. "large" as an argument adds a matrix of more than 2^31 elements.
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "cuda/backend.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "problem.h"

namespace {

using namespace fp4linear;

constexpr int skipped = 77;  // tests/cpp/CMakeLists.txt: SKIP_RETURN_CODE

struct Weight {
    std::int64_t n = 0;
    std::int64_t k = 0;
    int block_size = 16;
    std::vector<std::uint8_t> b;
    std::vector<std::uint8_t> scales;
    std::vector<float> scale2;  // none, one or n

    [[nodiscard]] cuda::DequantizeArguments arguments() const {
        return {.n = n,
                .k = k,
                .block_size = block_size,
                .b = b.data(),
                .scales = scales.data(),
                .scale2 = scale2.empty() ? nullptr : scale2.data(),
                .per_row = scale2.size() > 1};
    }
    [[nodiscard]] float value(std::int64_t row, std::int64_t col) const {
        const float e2m1 = float_from_e2m1(e2m1_code(b.data() + row * (k / 2), col));
        const float e4m3 = float_from_e4m3(scales[row * blocks_per_row(k, block_size) + col / block_size]);
        const float factor = scale2.empty() ? 1.0f : scale2[scale2.size() > 1 ? row : 0];
        return e2m1 * e4m3 * factor;
    }
};

Weight random_weight(std::int64_t n, std::int64_t k, int block_size, std::size_t scale2_count) {
    std::mt19937 random(static_cast<std::uint32_t>(n * 1000003 + k * 101 + block_size));
    Weight w{.n = n, .k = k, .block_size = block_size, .b = {}, .scales = {}, .scale2 = {}};
    w.b.resize(static_cast<std::size_t>(n * (k / 2)));
    w.scales.resize(static_cast<std::size_t>(n * blocks_per_row(k, block_size)));
    for (auto& byte : w.b) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : w.scales) byte = static_cast<std::uint8_t>(random());  // NaN, -0 and subnormals too
    for (std::size_t i = 0; i < scale2_count; ++i)
        w.scale2.push_back(std::ldexp(static_cast<float>(random() % 4096 + 1), static_cast<int>(random() % 24) - 20));
    return w;
}

// A pattern of the output type; every NaN is one.
std::uint32_t expected_bits(float value, DType dtype) {
    if (std::isnan(value)) return 0xFFFFFFFFu;
    switch (dtype) {
        case DType::float16: return half_from_float(value);
        case DType::bfloat16: return bfloat_from_float(value);
        case DType::float32: return std::bit_cast<std::uint32_t>(value);
    }
    return 0;
}

std::uint32_t got_bits(const std::vector<std::uint8_t>& out, std::size_t index, DType dtype) {
    if (dtype == DType::float32) {
        const std::uint32_t bits = reinterpret_cast<const std::uint32_t*>(out.data())[index];
        return std::isnan(std::bit_cast<float>(bits)) ? 0xFFFFFFFFu : bits;
    }
    const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(out.data())[index];
    const float value = dtype == DType::float16 ? float_from_half(bits) : float_from_bfloat(bits);
    return std::isnan(value) ? 0xFFFFFFFFu : bits;
}

void compare(const Weight& w, DType dtype, std::int64_t row_step) {
    std::vector<std::uint8_t> out(static_cast<std::size_t>(w.n * w.k) * size_of(dtype), 0xA5);
    cuda::dequantize_host(w.arguments(), dtype, out.data(), 0);
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < w.n; row = row == w.n - 1 ? w.n : std::min(row + row_step, w.n - 1))
        for (std::int64_t col = 0; col < w.k; ++col)
            wrong += got_bits(out, static_cast<std::size_t>(row * w.k + col), dtype) !=
                     expected_bits(w.value(row, col), dtype);
    if (wrong != 0)
        std::cerr << name_of(dtype) << " [" << w.n << ", " << w.k << "] block_size " << w.block_size << "\n";
    CHECK_EQ(wrong, 0);
}

void compare_all(bool large) {
    struct Case {
        std::int64_t n, k;
        int block_size;
    };
    for (const Case c : {Case{1, 2, 16},
                         {3, 16, 16},
                         {256, 4096, 16},
                         {7, 34, 16},
                         {5, 96, 32},
                         {5, 48, 48},
                         {9, 30, 7},
                         {4, 64, 1},
                         {2, 62, 1000},
                         {70001, 32, 16},
                         {3, 262144, 16},
                         {65537, 18, 16}}) {
        for (const std::size_t scale2_count : {std::size_t{0}, std::size_t{1}, static_cast<std::size_t>(c.n)}) {
            const Weight w = random_weight(c.n, c.k, c.block_size, scale2_count);
            for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) compare(w, dtype, 1);
        }
    }
    // Every code with every scale, exact in each type.
    Weight every{.n = 256, .k = 16, .block_size = 16, .b = {}, .scales = {}, .scale2 = {}};
    for (int scale = 0; scale < 256; ++scale) {
        every.scales.push_back(static_cast<std::uint8_t>(scale));
        for (int pair = 0; pair < 8; ++pair)
            every.b.push_back(pack_e2m1(static_cast<std::uint8_t>(2 * pair), static_cast<std::uint8_t>(2 * pair + 1)));
    }
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) compare(every, dtype, 1);
    if (large) compare(random_weight(70001, 32768, 16, 1), DType::bfloat16, 997);
    if (large) compare(random_weight(70001, 32766, 18, 1), DType::float16, 997);
}

void check_errors() {
    try {
        cuda::device_info(cuda::device_count());
        CHECK(false);
    } catch (const std::runtime_error& error) {
        const std::string_view message = error.what();
        CHECK(message.find(cuda::built() ? "CUDA device" : "FP4LINEAR_CUDA=on") != std::string_view::npos);
    }
    if (cuda::device_count() > 0) {
        // An error of one call leaves the next one right.
        const Weight w = random_weight(2, 32, 16, 1);
        std::vector<float> out(64);
        try {
            cuda::dequantize_host(w.arguments(), DType::float32, out.data(), cuda::device_count());
            CHECK(false);
        } catch (const std::runtime_error& error) {
            CHECK(std::string_view(error.what()).find("cudaErrorInvalidDevice") != std::string_view::npos);
        }
        compare(w, DType::float32, 1);
    }
}

}  // namespace

int main(int argc, char** argv) {
    check_errors();
    CHECK_EQ(cuda::device_count() > 0, cuda::no_device_reason().empty());
    CHECK_EQ(cuda::built(), !cuda::architectures().empty());
    if (cuda::device_count() > 0) {
        compare_all(argc > 1 && std::string_view(argv[1]) == "large");
        const cuda::DeviceInfo info = cuda::device_info(0);
        CHECK(info.sm >= 75);
        CHECK(info.sm_count > 0);
        std::cout << info.name << ", sm_" << info.sm << ", " << cuda::build_info() << "\n";
    }
    const int status = check_report();
    if (status != 0 || cuda::device_count() > 0) return status;
    std::cout << "kernels skipped: " << cuda::no_device_reason() << "\n";
    return skipped;
}
