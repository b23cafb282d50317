// Every instruction set that runs here, both paths, against a plain fp64 loop over the canonical arrays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/cpu.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"

using namespace fp4linear;
using cpu::Isa;

namespace {

constexpr DType dtypes[] = {DType::float16, DType::bfloat16, DType::float32};
using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

float element(DType dtype, const std::uint8_t* at) {
    if (dtype == DType::float32) {
        float value;
        std::memcpy(&value, at, sizeof(value));
        return value;
    }
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof(bits));
    return dtype == DType::float16 ? float_from_half(bits) : float_from_bfloat(bits);
}

void set_element(DType dtype, std::uint8_t* at, float value) {
    if (dtype == DType::float32) {
        std::memcpy(at, &value, sizeof(value));
        return;
    }
    const std::uint16_t bits = dtype == DType::float16 ? half_from_float(value) : bfloat_from_float(value);
    std::memcpy(at, &bits, sizeof(bits));
}

struct Layer {
    std::int64_t n, k;
    int block_size;
    Bytes b, scales;
    std::vector<float> scale2{1.0f};
    std::vector<float> bias;

    // Any code; scale bytes in [low, high].
    Layer(std::int64_t n, std::int64_t k, int block_size, Random& random, int low = 0x20, int high = 0x58)
        : n(n),
          k(k),
          block_size(block_size),
          b(static_cast<std::size_t>(n * k / 2)),
          scales(static_cast<std::size_t>(n * blocks_per_row(k, block_size))) {
        for (auto& byte : b) byte = static_cast<std::uint8_t>(random());
        for (auto& byte : scales) byte = static_cast<std::uint8_t>(low + static_cast<int>(random() % (high - low + 1)));
    }
    [[nodiscard]] double weight(std::int64_t row, std::int64_t column) const {
        const double code = float_from_e2m1(e2m1_code(b.data() + row * (k / 2), column));
        return code * float_from_e4m3(
                          scales[static_cast<std::size_t>(row * blocks_per_row(k, block_size) + column / block_size)]);
    }
};

// Rows of x in a buffer that starts `offset` bytes after an aligned address; row i lies at base + i * stride elements.
struct Rows {
    DType dtype;
    std::int64_t m, k, stride;
    Bytes buffer;
    std::int64_t base;

    Rows(DType dtype, std::int64_t m, std::int64_t k, std::int64_t stride = 0, bool repeat = false, int offset = 0)
        : dtype(dtype),
          m(m),
          k(k),
          stride(repeat        ? 0
                 : stride == 0 ? k
                               : stride) {
        const auto element_bytes = static_cast<std::int64_t>(size_of(dtype));
        const std::int64_t span = (std::max<std::int64_t>(m - 1, 0) * std::abs(this->stride) + k) * element_bytes;
        buffer.assign(static_cast<std::size_t>(span + offset), 0);
        base = offset + (this->stride < 0 ? (m - 1) * -this->stride * element_bytes : 0);
    }
    std::uint8_t* at(std::int64_t row, std::int64_t column) {
        return buffer.data() + base + (row * stride + column) * static_cast<std::int64_t>(size_of(dtype));
    }
    void fill(Random& random, float scale = 1.0f) {
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < k; ++j) set_element(dtype, at(i, j), scale * normal(random));
        }
    }
};

Bytes run(const Isa& isa, bool gemv, const cpu::Weight& weight, const Layer& layer, Rows& x, int threads = 1) {
    const auto count = static_cast<std::size_t>(x.m * layer.n) * size_of(x.dtype);
    Bytes y(count + 1, 0xCD);  // poisoned; one byte past the end must stay
    Problem problem;
    problem.m = x.m;
    problem.n = layer.n;
    problem.k = layer.k;
    problem.block_size = layer.block_size;
    problem.dtype = x.dtype;
    problem.x = x.buffer.data() + x.base;
    problem.x_row_stride = x.stride;
    problem.y = y.data();
    cpu::Epilogue epilogue;
    epilogue.scale2 = layer.scale2.data();
    epilogue.per_row = layer.scale2.size() > 1;
    epilogue.bias = layer.bias.empty() ? nullptr : layer.bias.data();
    (gemv ? isa.gemv : isa.gemm)(weight.view(), problem, epilogue, threads);
    CHECK(y.back() == 0xCD);
    y.pop_back();
    return y;
}

// |y - ref| <= u |ref| + 2^-15 sum |x w scale2|, and the spacing of the type where ref is subnormal in it.
bool agrees(const Layer& layer, Rows& x, const Bytes& y, const std::string& what) {
    constexpr double limits[] = {65504.0, 3.3895313892515355e38, 3.4028234663852886e38};
    constexpr double units[] = {0x1p-11, 0x1p-8, 0x1p-24};
    constexpr double smallest[] = {0x1p-25, 0x1p-134, 0x1p-149};
    const int type = static_cast<int>(x.dtype);
    for (std::int64_t i = 0; i < x.m; ++i) {
        for (std::int64_t n = 0; n < layer.n; ++n) {
            double sum = 0;
            double sizes = 0;
            for (std::int64_t k = 0; k < layer.k; ++k) {
                const double product = layer.weight(n, k) * element(x.dtype, x.at(i, k));
                sum += product;
                sizes += std::fabs(product);
            }
            const double scale2 = layer.scale2[layer.scale2.size() > 1 ? static_cast<std::size_t>(n) : 0];
            const double reference =
                sum * scale2 + (layer.bias.empty() ? 0.0 : layer.bias[static_cast<std::size_t>(n)]);
            const double got =
                element(x.dtype, y.data() + (i * layer.n + n) * static_cast<std::int64_t>(size_of(x.dtype)));
            const double error =
                units[type] * std::fabs(reference) + 0x1p-15 * sizes * std::fabs(scale2) + smallest[type];
            bool good = std::fabs(got - reference) <= error;
            if (std::isnan(reference)) good = std::isnan(got);
            if (std::isinf(reference)) good = got == reference;
            // Beyond the end of the type the result is infinite; near the end it may be either.
            if (std::isfinite(reference) && std::isinf(got)) {
                good = std::fabs(reference) + error > limits[type] && std::signbit(got) == std::signbit(reference);
            }
            if (!good) {
                std::cerr << what << " y[" << i << "," << n << "] = " << got << ", reference " << reference
                          << ", tolerance " << error << "\n";
                return false;
            }
        }
    }
    return true;
}

std::string label(const Isa& isa, bool gemv, DType dtype, std::int64_t m, const Layer& layer) {
    return std::string(isa.name) + (gemv ? " gemv " : " gemm ") + name_of(dtype) + " M=" + std::to_string(m) +
           " N=" + std::to_string(layer.n) + " K=" + std::to_string(layer.k) +
           " bs=" + std::to_string(layer.block_size);
}

template <class Body>
void for_each_isa(const Body& body) {
    for (const Isa& isa : cpu::all_isas()) {
        if (!isa.runs_here()) continue;
        for (const bool gemv : {true, false}) body(isa, gemv);
    }
}

cpu::Weight weight_of(const Layer& layer) {
    return cpu::Weight(layer.n, layer.k, layer.block_size, layer.b.data(), layer.scales.data());
}

void canonical_is_the_input() {
    Random random(1);
    for (const std::int64_t n : {0, 1, 5, 16, 17, 33}) {
        for (const std::int64_t k : {0, 2, 14, 16, 30, 64, 66, 192, 200}) {
            for (const int block_size : {1, 7, 10, 16, 24, 32, 64, 1000}) {
                const Layer layer(n, k, block_size, random, 0, 255);
                const cpu::Weight weight = weight_of(layer);
                Bytes b(layer.b.size(), 0xEE);
                Bytes scales(layer.scales.size(), 0xEE);
                weight.canonical(b.data(), scales.data());
                CHECK(b == layer.b);
                CHECK(scales == layer.scales);
                CHECK(weight.nbytes() >= b.size() + (layer.scales.empty() ? 0 : 1));
            }
        }
    }
}

void shapes_and_block_sizes() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(2);
        for (const DType dtype : dtypes) {
            for (const std::int64_t m : {1, 2, 3, 4, 5, 7, 8, 9, 13, 17, 26}) {
                for (const auto& [n, k, block_size] : std::vector<std::array<int, 3>>{{1, 2, 16},
                                                                                      {5, 16, 16},
                                                                                      {16, 64, 16},
                                                                                      {17, 94, 16},
                                                                                      {40, 464, 16},
                                                                                      {33, 192, 32},
                                                                                      {20, 258, 64},
                                                                                      {9, 100, 128},
                                                                                      {18, 130, 8},
                                                                                      {7, 62, 10},
                                                                                      {19, 66, 1},
                                                                                      {130, 96, 24}}) {
                    Layer layer(n, k, block_size, random);
                    layer.scale2 = {0.015625f};
                    Rows x(dtype, m, k);
                    x.fill(random);
                    CHECK(agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x),
                                 label(isa, gemv, dtype, m, layer)));
                }
            }
        }
    });
}

void long_k_crosses_slices() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(3);
        for (const DType dtype : dtypes) {
            Layer layer(150, 2320, 16, random);
            for (const std::int64_t m : {1, 14}) {
                Rows x(dtype, m, layer.k);
                x.fill(random, 0.125f);
                layer.scale2 = {0.0625f};
                CHECK(
                    agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x, 2), label(isa, gemv, dtype, m, layer)));
            }
        }
    });
}

void epilogue_per_row_scale_and_bias() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(4);
        for (const DType dtype : dtypes) {
            Layer layer(37, 80, 16, random);
            layer.scale2.clear();
            for (int i = 0; i < 37; ++i) {
                layer.scale2.push_back(std::ldexp(i % 3 == 0 ? -1.25f : 0.75f, i % 9 - 8));
                layer.bias.push_back(static_cast<float>(i) - 11.0f);
            }
            Rows x(dtype, 5, 80);
            x.fill(random);
            CHECK(agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x), label(isa, gemv, dtype, 5, layer)));
        }
    });
}

// A sum beyond 65504 whose result fits must be rounded once, after scale2.
void rounds_once() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(5);
        Layer layer(3, 4096, 16, random);
        std::fill(layer.b.begin(), layer.b.end(), std::uint8_t{0x77});
        std::fill(layer.scales.begin(), layer.scales.end(), std::uint8_t{0x7E});
        for (const std::int64_t m : {1, 8, 9, 64}) {
            for (const auto& [scale2, expected] : {std::pair{0x1p-12f, 2688.0f}, std::pair{1.0f / 3584.0f, 3072.0f}}) {
                layer.scale2 = {scale2};
                Rows x(DType::float16, m, 4096);
                for (std::int64_t i = 0; i < m; ++i) {
                    for (std::int64_t k = 0; k < 4096; ++k) set_element(DType::float16, x.at(i, k), 1.0f);
                }
                const Bytes y = run(isa, gemv, weight_of(layer), layer, x);
                for (std::size_t i = 0; i < y.size(); i += 2) CHECK_EQ(element(DType::float16, y.data() + i), expected);
            }
        }
    });
}

void every_scale_byte() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(6);
        for (const DType dtype : dtypes) {
            for (const int block_size : {16, 12}) {
                Layer layer(64, 64, block_size, random);
                for (std::size_t i = 0; i < layer.scales.size(); ++i) layer.scales[i] = static_cast<std::uint8_t>(i);
                Rows x(dtype, 3, 64);
                x.fill(random, 0.25f);
                for (std::int64_t k = 0; k < 64; ++k) set_element(dtype, x.at(1, k), 0.0f);
                CHECK(agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x), label(isa, gemv, dtype, 3, layer)));
            }
        }
    });
}

// One weight, one x: the decoded value itself, bit for bit.
void every_code_with_every_scale_is_exact() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(7);
        for (const int block_size : {16, 6}) {
            Layer layer(256, 16, block_size, random);
            std::fill(layer.b.begin(), layer.b.end(), std::uint8_t{0});
            const std::int64_t blocks = blocks_per_row(16, block_size);
            for (int row = 0; row < 256; ++row) {
                for (int byte = 0; byte < 8; ++byte) {
                    layer.b[static_cast<std::size_t>(row) * 8 + static_cast<std::size_t>(byte)] =
                        static_cast<std::uint8_t>(2 * byte + ((2 * byte + 1) << 4));
                }
                for (std::int64_t i = 0; i < blocks; ++i) {
                    layer.scales[static_cast<std::size_t>(row * blocks + i)] = static_cast<std::uint8_t>(row);
                }
            }
            Rows x(DType::float32, 16, 16);
            for (int i = 0; i < 16; ++i) set_element(DType::float32, x.at(i, i), 1.0f);
            const Bytes y = run(isa, gemv, weight_of(layer), layer, x);
            for (int i = 0; i < 16; ++i) {
                for (int row = 0; row < 256; ++row) {
                    const float got = element(DType::float32, y.data() + 4 * (i * 256 + row));
                    const auto expected = static_cast<float>(layer.weight(row, i));
                    const bool nan = is_e4m3_nan(static_cast<std::uint8_t>(row));
                    CHECK(nan ? std::isnan(got) : got == expected);
                }
            }
        }
    });
}

void strides_and_alignment() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(8);
        for (const DType dtype : dtypes) {
            const Layer layer(21, 112, 16, random);
            const cpu::Weight weight = weight_of(layer);
            for (const std::int64_t m : {1, 6, 18}) {
                Rows plain(dtype, m, 112);
                plain.fill(random);
                const Bytes expected = run(isa, gemv, weight, layer, plain);
                for (const std::int64_t stride : {113, 160, -112, -131}) {
                    for (const int offset : {0, 1, 2, 3, 6}) {
                        Rows x(dtype, m, 112, stride, false, offset);
                        for (std::int64_t i = 0; i < m; ++i) {
                            std::memcpy(x.at(i, 0), plain.at(i, 0), 112 * size_of(dtype));
                        }
                        CHECK(run(isa, gemv, weight, layer, x) == expected);
                    }
                }
                Rows same(dtype, m, 112, 0, true);
                std::memcpy(same.at(0, 0), plain.at(0, 0), 112 * size_of(dtype));
                const Bytes y = run(isa, gemv, weight, layer, same);
                const std::size_t row = 21 * size_of(dtype);
                for (std::int64_t i = 0; i < m; ++i) {
                    CHECK(std::memcmp(y.data() + static_cast<std::size_t>(i) * row, expected.data(), row) == 0);
                }
            }
        }
    });
}

// The whole finite range of the type, mixed in a row and alone, subnormals included; no result may be lost to a
// flush or to an overflow of an unscaled sum.
void extreme_values() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(9);
        for (const DType dtype : dtypes) {
            const int lowest = dtype == DType::float16 ? -24 : dtype == DType::bfloat16 ? -133 : -149;
            const int highest = dtype == DType::float16 ? 15 : 127;
            for (const int block_size : {16, 20}) {
                for (int exponent = lowest; exponent <= highest; ++exponent) {
                    Layer layer(18, 48, block_size, random);
                    layer.scale2 = {exponent > 0 ? 0x1p-20f : 0x1p20f};
                    Rows x(dtype, 4, 48);
                    for (std::int64_t k = 0; k < 48; ++k) {
                        const float sign = random() % 2 ? 1.0f : -1.0f;
                        set_element(dtype, x.at(0, k), sign * std::ldexp(1.0f, exponent));
                        // One alone among zeros; one scale among another; all scales mixed.
                        set_element(dtype, x.at(1, k), k == 5 ? std::ldexp(1.0f, exponent) : 0.0f);
                        set_element(dtype, x.at(2, k), std::ldexp(sign * 1.25f, k % 2 ? exponent : lowest + 2));
                        const int any = lowest + static_cast<int>(random() % static_cast<unsigned>(highest - lowest));
                        set_element(dtype, x.at(3, k), std::ldexp(sign, any));
                    }
                    CHECK(agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x),
                                 label(isa, gemv, dtype, 4, layer)));
                }
            }
        }
    });
}

void bad_rows_stay_alone() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(10);
        for (const DType dtype : dtypes) {
            const Layer layer(20, 64, 16, random);
            const cpu::Weight weight = weight_of(layer);
            for (const std::int64_t m : {8, 12, 30}) {
                Rows x(dtype, m, 64);
                x.fill(random);
                const Bytes clean = run(isa, gemv, weight, layer, x);
                set_element(dtype, x.at(5, 3), std::numeric_limits<float>::quiet_NaN());
                set_element(dtype, x.at(7, 0), std::numeric_limits<float>::infinity());
                if (dtype != DType::float16) set_element(dtype, x.at(6, 1), 1e-38f);
                const Bytes y = run(isa, gemv, weight, layer, x);
                CHECK(agrees(layer, x, y, label(isa, gemv, dtype, m, layer)));
                const std::size_t row = 20 * size_of(dtype);
                for (std::int64_t i = 0; i < m; ++i) {
                    if (i >= 5 && i <= 7) continue;
                    const auto at = static_cast<std::size_t>(i) * row;
                    CHECK(std::memcmp(y.data() + at, clean.data() + at, row) == 0);
                }
            }
        }
    });
}

// Infinities and NaNs in every place of x, with zero codes, zero scales and both signs of scale.
void infinities_follow_ieee() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(11);
        for (const DType dtype : dtypes) {
            Layer layer(32, 64, 16, random);
            for (std::size_t i = 0; i < layer.scales.size(); ++i) {
                if (i % 5 == 0) layer.scales[i] = 0;
                if (i % 7 == 0) layer.scales[i] |= 0x80;
            }
            Rows x(dtype, 64, 64);
            x.fill(random);
            for (std::int64_t i = 0; i < 64; ++i) {
                const float sign = i % 2 ? -1.0f : 1.0f;
                set_element(dtype, x.at(i, i), sign * std::numeric_limits<float>::infinity());
                if (i % 4 == 3) set_element(dtype, x.at(i, 63 - i), std::numeric_limits<float>::infinity());
            }
            CHECK(agrees(layer, x, run(isa, gemv, weight_of(layer), layer, x), label(isa, gemv, dtype, 64, layer)));
        }
    });
}

void threads_do_not_change_bits() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(12);
        for (const DType dtype : dtypes) {
            for (const int block_size : {16, 18}) {
                const Layer layer(700, 640, block_size, random);
                const cpu::Weight weight = weight_of(layer);
                for (const std::int64_t m : {1, 3, 20}) {
                    Rows x(dtype, m, 640);
                    x.fill(random);
                    const Bytes one = run(isa, gemv, weight, layer, x, 1);
                    for (const int threads : {2, 3, 7}) CHECK(run(isa, gemv, weight, layer, x, threads) == one);
                }
            }
        }
    });
}

void a_row_does_not_depend_on_the_others() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(13);
        for (const DType dtype : dtypes) {
            for (const int block_size : {16, 14}) {
                const Layer layer(50, 1090, block_size, random);
                const cpu::Weight weight = weight_of(layer);
                Rows all(dtype, 70, 1090);
                all.fill(random);
                if (dtype != DType::float16) set_element(dtype, all.at(4, 9), 1e-37f);
                const std::size_t row = 50 * size_of(dtype);
                const Bytes y = run(isa, gemv, weight, layer, all);
                for (std::int64_t m = 1; m <= 27; ++m) {
                    Rows some(dtype, m, 1090);
                    for (std::int64_t i = 0; i < m; ++i)
                        std::memcpy(some.at(i, 0), all.at(70 - m + i, 0), 1090 * size_of(dtype));
                    const Bytes part = run(isa, gemv, weight, layer, some);
                    CHECK(std::memcmp(part.data(), y.data() + static_cast<std::size_t>(70 - m) * row,
                                      static_cast<std::size_t>(m) * row) == 0);
                }
            }
        }
    });
}

void empty_shapes() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(14);
        for (const DType dtype : dtypes) {
            for (const auto& [m, n, k] :
                 std::vector<std::array<int, 3>>{{0, 5, 32}, {3, 0, 32}, {0, 0, 0}, {3, 5, 0}}) {
                Layer layer(n, k, 16, random);
                layer.bias.assign(static_cast<std::size_t>(n), 1.5f);
                Rows x(dtype, m, k);
                const Bytes y = run(isa, gemv, weight_of(layer), layer, x);
                for (std::size_t i = 0; i < y.size(); i += size_of(dtype)) CHECK_EQ(element(dtype, y.data() + i), 1.5f);
            }
        }
    });
}

void the_forced_set_runs() {
    for_each_isa([](const Isa& isa, bool gemv) {
        Random random(15);
        const Layer layer(16, 64, 16, random);
        Rows x(DType::bfloat16, 1, 64);
        x.fill(random);
        run(isa, gemv, weight_of(layer), layer, x);
        CHECK_EQ(cpu::last_isa_run(), isa.name);
    });
    CHECK(cpu::find_isa("portable") != nullptr && cpu::find_isa("portable")->runs_here());
    CHECK(cpu::find_isa("avx1024") == nullptr);
    CHECK(cpu::best_isa().runs_here());
    CHECK(&cpu::best_isa() == &*std::find_if(cpu::all_isas().begin(), cpu::all_isas().end(),
                                             [](const Isa& isa) { return isa.runs_here(); }));
    for (const Isa& isa : cpu::all_isas()) {
        for (const DType dtype : dtypes) CHECK(cpu::gemv_max_m(isa, dtype) >= 1);
    }
}

}  // namespace

int main() {
    canonical_is_the_input();
    shapes_and_block_sizes();
    long_k_crosses_slices();
    epilogue_per_row_scale_and_bias();
    rounds_once();
    every_scale_byte();
    every_code_with_every_scale_is_exact();
    strides_and_alignment();
    extreme_values();
    bad_rows_stay_alone();
    infinities_follow_ieee();
    threads_do_not_change_bits();
    a_row_does_not_depend_on_the_others();
    empty_shapes();
    the_forced_set_runs();
    return check_report();
}
