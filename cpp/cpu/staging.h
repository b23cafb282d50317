// Rows of x as the kernels see them: a row of x is one staged row, or up to three where its values leave the
// middle band (kernels.h).
#pragma once
#include <cstdint>
#include <vector>

#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "problem.h"

namespace fp4linear::cpu {

struct StagedRow {
    std::int64_t row = 0;  // of x
    Band band = Band::middle;
};

// The staged rows of x rows [begin, end), those of one row consecutive and the middle band first.
std::vector<StagedRow> plan_rows(const KernelTable& table, const Problem& problem, std::int64_t begin, std::int64_t end,
                                 int threads);

// What the sum of a staged row is to be multiplied with.
double factor_of(Band band);

const void* row_of(const Problem& problem, std::int64_t row);

// Fewer threads for little work, so that each has about 4 us of it: a wake-up costs up to that.
int threads_for(std::int64_t multiplications, int threads);

// Epilogue of x rows [begin, end) for output columns [column, column + count): sums holds their staged rows in order,
// row_stride floats apart; `staged` starts with the first of them.
void finish_rows(const KernelTable& table, const Problem& problem, const Epilogue& epilogue,
                 const std::vector<StagedRow>& staged, const float* sums, std::int64_t row_stride, std::int64_t column,
                 std::int64_t count);

// Rows split into blocks of at most `most` rows of nearly equal size.
struct RowBlocks {
    RowBlocks(std::int64_t rows, int most) : rows(rows), count((rows + most - 1) / most) {}
    std::int64_t rows;
    std::int64_t count;
    [[nodiscard]] std::int64_t begin(std::int64_t block) const { return rows * block / count; }
    [[nodiscard]] int size(std::int64_t block) const { return static_cast<int>(begin(block + 1) - begin(block)); }
};

// The two paths, for any instruction set.
void run_gemv(const KernelTable& table, const WeightView& weight, const Problem& problem, const Epilogue& epilogue,
              int threads);
void run_gemm(const KernelTable& table, const WeightView& weight, const Problem& problem, const Epilogue& epilogue,
              int threads);

}  // namespace fp4linear::cpu
