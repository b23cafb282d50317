// The decode path: every thread streams its own contiguous tiles of the weight once and multiplies each with all rows
// of x, at most gemv_rows at a time.
#include <algorithm>

#include "cpu/aligned_buffer.h"
#include "cpu/staging.h"
#include "cpu/thread_pool.h"
#include "cpu/weight.h"

namespace fp4linear::cpu {
namespace {

constexpr std::int64_t rows_a_pass = 64;  // rows of x staged at once; their sums of one tile stay in the L1 cache
constexpr std::int64_t most_staged_rows = 3 * rows_a_pass;

}  // namespace

void run_gemv(const KernelTable& table, const WeightView& weight, const Problem& problem, const Epilogue& epilogue,
              int threads) {
    if (problem.m == 0 || weight.n == 0) return;
    if (!weight.tiled) return run_gemm(table, weight, problem, epilogue, threads);
    const Operand operand = table.gemv_operand[static_cast<int>(problem.dtype)];
    const int most_rows = table.gemv_rows;
    const std::int64_t row_bytes = operand.bytes(weight.steps * step_k);
    static thread_local AlignedBuffer staged_x;

    for (std::int64_t first = 0; first < problem.m; first += rows_a_pass) {
        const std::int64_t last = std::min(first + rows_a_pass, problem.m);
        const std::vector<StagedRow> staged = plan_rows(table, problem, first, last, threads);
        const auto rows = static_cast<std::int64_t>(staged.size());
        const RowBlocks blocks(rows, most_rows);
        staged_x.reserve(static_cast<std::size_t>(rows * row_bytes));
        std::uint8_t* x = staged_x.bytes();
        const auto pack = [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t block = begin; block < end; ++block) {
                const int size = blocks.size(block);
                for (int r = 0; r < size; ++r) {
                    const StagedRow& row = staged[static_cast<std::size_t>(blocks.begin(block) + r)];
                    table.pack_gemv(problem.dtype, row_of(problem, row.row), problem.k, row.band, operand,
                                    x + blocks.begin(block) * row_bytes + r * operand.bytes(step_k),
                                    size * operand.bytes(step_k));
                }
            }
        };
        parallel_ranges(blocks.count, threads_for(rows * problem.k, threads), pack);

        const auto multiply = [&](std::int64_t begin, std::int64_t end) {
            alignas(64) float sums[most_staged_rows * tile_rows];
            for (std::int64_t tile = begin; tile < end; ++tile) {
                for (std::int64_t block = 0; block < blocks.count; ++block) {
                    table.gemv_tile(tile_of(weight, tile), weight.steps, weight.plain_scales,
                                    x + blocks.begin(block) * row_bytes, operand, blocks.size(block),
                                    sums + blocks.begin(block) * tile_rows);
                }
                const std::int64_t column = tile * tile_rows;
                finish_rows(table, problem, epilogue, staged, sums, tile_rows, column,
                            std::min<std::int64_t>(tile_rows, weight.n - column));
            }
        };
        parallel_ranges(weight.tiles, threads_for(weight.n * problem.k * rows, threads), multiply);
    }
}

}  // namespace fp4linear::cpu
