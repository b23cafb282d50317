// Small layers on the CPU: every instruction set that runs here and both paths, against sums in fp64; canonical bytes
// back as they came; a borrowed weight in both of the CPU's forms with the layer's bits; forms there and back.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "borrowed_weight.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"
#include "formats/float16.h"
#include "input.h"
#include "linear.h"

namespace {

using namespace fp4linear;

constexpr std::uint8_t poison = 0xFF;  // as fp16, bf16 and fp32: NaN

struct Case {
    std::int64_t m, n, k;
    int block_size;
    std::vector<std::uint8_t> b, scales;
    std::vector<float> scale2, bias;
    DType dtype;
    std::vector<std::uint8_t> x;  // padded rows
    std::int64_t stride;
};

float value_at(const std::uint8_t* data, DType dtype, std::int64_t index) {
    if (dtype == DType::float32) {
        float value = 0;
        std::memcpy(&value, data + 4 * index, 4);
        return value;
    }
    std::uint16_t bits = 0;
    std::memcpy(&bits, data + 2 * index, 2);
    return dtype == DType::float16 ? float_from_half(bits) : float_from_bfloat(bits);
}

Case draw(Input& input) {
    Case c{};
    c.m = input.one_of({1, 2, 3, 7, 8, 9, 17, 33});
    c.n = input.from(1, 40);
    c.k = 2 * input.from(1, 100);
    c.block_size = input.one_of({16, 16, 16, 32, 8, 64, 1, 7, 256});
    c.dtype = static_cast<DType>(input.from(0, 2));
    c.stride = c.k + (input.flag() ? input.from(0, 9) : 0);
    const auto blocks = static_cast<std::size_t>(blocks_per_row(c.k, c.block_size));
    const std::uint8_t seed = input.byte();
    c.b.resize(static_cast<std::size_t>(c.n * c.k / 2));
    for (std::size_t i = 0; i < c.b.size(); ++i) c.b[i] = static_cast<std::uint8_t>(input.byte() ^ (seed * i >> 3));
    c.scales.resize(static_cast<std::size_t>(c.n) * blocks);
    const bool any_scale = input.flag();
    for (auto& scale : c.scales) {
        const std::uint8_t drawn = input.byte();
        scale = any_scale ? (is_e4m3_nan(drawn) ? 0x38 : drawn) : static_cast<std::uint8_t>(0x30 + drawn % 0x20);
    }
    c.scale2.resize(input.flag() ? static_cast<std::size_t>(c.n) : 1);
    for (auto& factor : c.scale2) factor = std::ldexp(1.0f + input.byte() / 256.0f, input.from(-12, 4));
    if (input.flag()) {
        c.bias.resize(static_cast<std::size_t>(c.n));
        for (auto& shift : c.bias) shift = (input.byte() - 128) / 16.0f;
    }
    c.x.resize(static_cast<std::size_t>(c.m * c.stride) * size_of(c.dtype));
    for (std::int64_t i = 0; i < c.m * c.stride; ++i) {
        const float value = std::ldexp(static_cast<float>(input.byte() ^ (seed * i & 0xFF)) - 127.5f, -7 - seed % 4);
        const std::uint16_t bits = c.dtype == DType::float16 ? half_from_float(value) : bfloat_from_float(value);
        if (c.dtype == DType::float32) {
            std::memcpy(c.x.data() + 4 * i, &value, 4);
        } else {
            std::memcpy(c.x.data() + 2 * i, &bits, 2);
        }
    }
    return c;
}

// The contract of tests/tolerance.py. Nothing here overflows.
void check_result(const Case& c, const std::vector<std::uint8_t>& y) {
    const double roundoff = c.dtype == DType::float16 ? 0x1p-11 : c.dtype == DType::bfloat16 ? 0x1p-8 : 0x1p-24;
    const double subnormal = c.dtype == DType::float16 ? 0x1p-25 : 0x1p-134;
    const std::int64_t blocks = blocks_per_row(c.k, c.block_size);
    for (std::int64_t n = 0; n < c.n; ++n) {
        const double factor = c.scale2[c.scale2.size() > 1 ? static_cast<std::size_t>(n) : 0];
        for (std::int64_t m = 0; m < c.m; ++m) {
            double sum = 0, magnitude = 0;
            for (std::int64_t k = 0; k < c.k; ++k) {
                const double scale = e4m3_values[c.scales[static_cast<std::size_t>(n * blocks + k / c.block_size)]];
                const double w = float_from_e2m1(e2m1_code(c.b.data() + n * c.k / 2, k)) * scale * factor;
                const double product = w * value_at(c.x.data(), c.dtype, m * c.stride + k);
                sum += product;
                magnitude += std::fabs(product);
            }
            if (!c.bias.empty()) {
                sum += c.bias[static_cast<std::size_t>(n)];
                magnitude += std::fabs(c.bias[static_cast<std::size_t>(n)]);
            }
            const double got = value_at(y.data(), c.dtype, m * c.n + n);
            if (c.dtype == DType::float16 && std::fabs(sum) + magnitude * 0x1p-15 >= 65520.0) continue;
            REQUIRE(std::fabs(got - sum) <= roundoff * std::fabs(sum) + 0x1p-15 * magnitude + subnormal);
        }
    }
}

void check_forms(const Case& c) {
    for (const BorrowedForm form : {BorrowedForm::tiled, BorrowedForm::prepacked}) {
        if (!unmet_by_form(form, c.k, c.block_size).empty()) continue;
        const auto units = static_cast<std::size_t>((c.n + unit_rows - 1) / unit_rows * ((c.k + unit_k - 1) / unit_k));
        std::vector<std::uint8_t> packed(units * unit_bytes, poison), b(c.b.size(), poison),
            scales(c.scales.size(), poison);
        pack(form, c.n, c.k, c.block_size, c.b.data(), c.scales.data(), packed.data());
        unpack(form, c.n, c.k, c.block_size, packed.data(), b.data(), scales.data());
        REQUIRE(b == c.b && scales == c.scales);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    setenv("FP4LINEAR_NUM_THREADS", "2", 1);
    Input input(data, size);
    const Case c = draw(input);
    check_forms(c);
    Options options;
    options.path = input.one_of({"auto", "cpu_gemv", "cpu_gemm"});
    options.num_threads = input.from(1, 3);
    const auto isas = cpu::all_isas();
    const cpu::Isa& isa = isas[input.byte() % isas.size()];
    options.cpu_isa = isa.runs_here() ? isa.name : cpu::best_isa().name;

    LinearArguments arguments;
    arguments.n = c.n;
    arguments.k = c.k;
    arguments.block_size = c.block_size;
    arguments.b = c.b.data();
    arguments.scales = c.scales.data();
    arguments.scale2 = c.scale2;
    arguments.bias = c.bias;
    const Linear layer(arguments, options);
    std::vector<std::uint8_t> b(c.b.size(), poison), scales(c.scales.size(), poison);
    layer.canonical(b.data(), scales.data());
    REQUIRE(b == c.b && scales == c.scales);

    std::vector<std::uint8_t> y(static_cast<std::size_t>(c.m * c.n) * size_of(c.dtype), poison);
    Problem problem;
    problem.m = c.m;
    problem.n = c.n;
    problem.k = c.k;
    problem.block_size = c.block_size;
    problem.dtype = c.dtype;
    problem.x = c.x.data();
    problem.x_row_stride = c.stride;
    problem.y = y.data();
    layer.forward(problem);
    check_result(c, y);

    std::vector<float> rows(static_cast<std::size_t>(c.n), c.scale2[0]);
    if (c.scale2.size() > 1) rows = c.scale2;
    BorrowedWeight borrowed;
    borrowed.scale2 = rows.data();
    borrowed.bias = c.bias.empty() ? nullptr : c.bias.data();
    std::vector<std::uint8_t> tiled;
    borrowed.weight = c.b.data();
    borrowed.scales = c.scales.data();
    if (unmet_by_form(BorrowedForm::tiled, c.k, c.block_size).empty()) {
        const std::size_t shift = input.from(0, 1);  // off the alignment that the kernels want
        tiled.resize(cpu::tiled_size(c.n, c.k) + shift);
        pack(BorrowedForm::tiled, c.n, c.k, c.block_size, c.b.data(), c.scales.data(), tiled.data() + shift);
        borrowed.form = BorrowedForm::tiled;
        borrowed.weight = tiled.data() + shift;
        borrowed.scales = nullptr;
    }
    std::vector<std::uint8_t> again(y.size(), poison);
    problem.y = again.data();
    forward(borrowed, problem, options);
    REQUIRE(again == y);
    return 0;
}
