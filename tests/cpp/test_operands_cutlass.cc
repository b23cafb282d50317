// What the tensor cores of native_nvfp4 read, walked on the host: operands and scales through CUTLASS's own layouts and
// packed 4-bit pointers, multiplied by plain loops, against run_native_emulated() on the same bytes. A wrong order of
// nibbles, a transposed operand or a scale in another place changes the result.
#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>
#include <cutlass/float8.h>
#include <cutlass/float_subbyte.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/native.h"
#include "formats/native_weight.h"
#include "formats/swizzle.h"
#include "problem.h"

namespace {

using namespace fp4linear;

constexpr int block = 16;
using Config = cutlass::detail::Sm1xxBlockScaledConfig<block>;

std::vector<std::uint8_t> swizzled(const std::vector<std::uint8_t>& scales, int rows, int blocks) {
    std::vector<std::uint8_t> out(static_cast<std::size_t>(swizzle::size(rows, blocks)), std::uint8_t{0});
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < blocks; ++c) out[swizzle::offset(r, c, blocks)] = scales[r * blocks + c];
    return out;
}

float scale_value(std::uint8_t byte) {
    cutlass::float_ue4m3_t value;
    value.storage = byte;
    return static_cast<float>(value);
}

int check(int m, int n, int k, unsigned seed) {
    std::mt19937 random(seed);
    const int blocks = k / block;
    std::vector<std::uint8_t> b(static_cast<std::size_t>(n) * (k / 2));
    std::vector<std::uint8_t> scales(static_cast<std::size_t>(n) * blocks);
    for (auto& byte : b) byte = static_cast<std::uint8_t>(random());
    for (auto& byte : scales) byte = static_cast<std::uint8_t>(0x28 + random() % 0x28);
    std::vector<float> x(static_cast<std::size_t>(m) * k);
    std::normal_distribution<float> normal;
    for (float& value : x) value = normal(random);

    Problem problem;
    problem.m = m;
    problem.n = n;
    problem.k = k;
    problem.block_size = block;
    problem.dtype = DType::float32;
    problem.x = x.data();
    problem.x_row_stride = k;
    std::vector<float> emulated(static_cast<std::size_t>(m) * n, -1.0f);
    problem.y = emulated.data();
    const cpu::Weight weight(n, k, block, b.data(), scales.data());
    const float scale2 = 0.25f;
    const float g = 1.0f;
    cpu::run_native_emulated(weight.view(), problem, {.scale2 = &scale2, .per_row = false, .bias = nullptr}, g, 1);

    std::vector<std::uint8_t> x_codes(static_cast<std::size_t>(m) * (k / 2));
    std::vector<std::uint8_t> x_scales(static_cast<std::size_t>(swizzle::size(m, blocks)), std::uint8_t{0xFF});
    cpu::quantize_activations(problem, g, ScaleLayout::swizzled, 1, x_codes.data(), x_scales.data());
    const std::vector<std::uint8_t> weight_scales = swizzled(scales, n, blocks);

    const auto shape = cute::make_shape(m, n, k, 1);
    const auto sfa = Config::tile_atom_to_shape_SFA(shape);
    const auto sfb = Config::tile_atom_to_shape_SFB(shape);
    const auto a_tensor =
        cute::make_tensor(cute::recast_ptr<cutlass::float_e2m1_t>(x_codes.data()),
                          cute::make_layout(cute::make_shape(m, k), cute::make_stride(k, cute::Int<1>{})));
    const auto b_tensor =
        cute::make_tensor(cute::recast_ptr<cutlass::float_e2m1_t>(b.data()),
                          cute::make_layout(cute::make_shape(n, k), cute::make_stride(k, cute::Int<1>{})));
    for (int row = 0; row < m; ++row) {
        for (int column = 0; column < n; ++column) {
            float sum = 0.0f;
            for (int c = 0; c < blocks; ++c) {
                float dot = 0.0f;
                for (int i = c * block; i < (c + 1) * block; ++i)
                    dot += static_cast<float>(cutlass::float_e2m1_t(a_tensor(row, i))) *
                           static_cast<float>(cutlass::float_e2m1_t(b_tensor(column, i)));
                const float factor = scale_value(x_scales[sfa(row, c * block, 0)]) *
                                     scale_value(weight_scales[sfb(column, c * block, 0)]);
                sum += dot * factor;
            }
            const float y = sum * scale2;
            const float want = emulated[static_cast<std::size_t>(row) * n + column];
            if (std::memcmp(&y, &want, sizeof y) == 0 || (y == 0.0f && want == 0.0f)) continue;
            std::printf("M=%d N=%d K=%d at (%d, %d): %.9g through CUTLASS's layouts, emulated %.9g\n", m, n, k, row,
                        column, y, want);
            return -1;
        }
    }
    return m * n;
}

}  // namespace

int main() {
    int outputs = 0;
    unsigned seed = 1;
    for (const int m : {1, 9, 33, 130, 257})
        for (const int n : {32, 96, 160})
            for (const int k : {32, 96, 256, 288}) {
                const int checked = check(m, n, k, seed++);
                if (checked < 0) return 1;
                outputs += checked;
            }
    std::printf("%d outputs agree\n", outputs);
    return outputs > 0 ? 0 : 1;
}
