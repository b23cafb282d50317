#include "cpu/staging.h"

#include <algorithm>
#include <array>

#include "cpu/thread_pool.h"

namespace fp4linear::cpu {
namespace {

constexpr std::int64_t least_multiplications_a_thread = 1 << 18;  // 4 us at 64 G/s, the rate of one Zen 4 core

}  // namespace

int threads_for(std::int64_t multiplications, int threads) {
    return static_cast<int>(
        std::clamp<std::int64_t>(multiplications / least_multiplications_a_thread, 1, std::max(threads, 1)));
}

const void* row_of(const Problem& problem, std::int64_t row) {
    const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
    return static_cast<const std::uint8_t*>(problem.x) + row * problem.x_row_stride * element;
}

double factor_of(Band band) {
    static_assert(band_shift_log2 == 64);
    if (band == Band::low) return sum_factor * 0x1p-64;
    if (band == Band::high) return sum_factor * 0x1p64;
    return sum_factor;
}

std::vector<StagedRow> plan_rows(const KernelTable& table, const Problem& problem, std::int64_t begin, std::int64_t end,
                                 int threads) {
    std::vector<std::uint8_t> found(static_cast<std::size_t>(end - begin));
    if (problem.dtype != DType::float16) {
        const auto body = [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; ++i) {
                found[static_cast<std::size_t>(i)] =
                    static_cast<std::uint8_t>(table.scan(problem.dtype, row_of(problem, begin + i), problem.k));
            }
        };
        parallel_ranges(end - begin, threads_for((end - begin) * problem.k, threads), body);
    }
    std::vector<StagedRow> staged;
    staged.reserve(found.size());
    for (std::int64_t row = begin; row < end; ++row) {
        const unsigned bands = found[static_cast<std::size_t>(row - begin)];
        staged.push_back({row, Band::middle});
        if (bands & has_low) staged.push_back({row, Band::low});
        if (bands & has_high) staged.push_back({row, Band::high});
    }
    return staged;
}

void finish_rows(const KernelTable& table, const Problem& problem, const Epilogue& epilogue,
                 const std::vector<StagedRow>& staged, const float* sums, std::int64_t row_stride, std::int64_t column,
                 std::int64_t count) {
    const auto element = static_cast<std::int64_t>(size_of(problem.dtype));
    const float* scale2 = epilogue.per_row ? epilogue.scale2 + column : epilogue.scale2;
    const float* bias = epilogue.bias == nullptr ? nullptr : epilogue.bias + column;
    for (std::size_t i = 0; i < staged.size();) {
        std::array<double, 3> factors{};
        const std::int64_t row = staged[i].row;
        std::size_t bands = 0;
        for (; i + bands < staged.size() && staged[i + bands].row == row; ++bands) {
            factors[bands] = factor_of(staged[i + bands].band);
        }
        auto* y = static_cast<std::uint8_t*>(problem.y) + (row * problem.n + column) * element;
        table.finish(sums + static_cast<std::int64_t>(i) * row_stride, row_stride, factors.data(),
                     static_cast<int>(bands), scale2, epilogue.per_row, bias, problem.dtype, y, count);
        i += bands;
    }
}

}  // namespace fp4linear::cpu
