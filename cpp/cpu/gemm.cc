// The blocked path: per 128 output columns and a slice of K, a thread decodes the weight once into a panel of scaled
// weights in its L2 cache and multiplies it with every row of x.
//
//   for 128 columns: for a slice of K: decode 8 tiles -> panel (256 KB, L2)
//                      for 13 rows of x (packed slice: 26 KB, L1): for 2 tiles: gemm_block, sums in registers
// The slice of K is a constant of the operand, so a row's order of additions depends on nothing else.
#include <algorithm>
#include <cstring>

#include "cpu/aligned_buffer.h"
#include "cpu/staging.h"
#include "cpu/thread_pool.h"
#include "cpu/weight.h"

namespace fp4linear::cpu {
namespace {

constexpr int panel_tiles = 8;
constexpr int panel_columns = panel_tiles * tile_rows;
constexpr std::int64_t slice_bytes_a_row = 2048;        // of packed x: 13 rows of it are 26 KB
constexpr std::int64_t most_rows_a_pass = 1024;         // the sums of a pass: 1024 x 128 fp32 = 512 KB a thread
constexpr std::int64_t packed_bytes_a_pass = 16 << 20;  // half of a usual share of the L3 cache

}  // namespace

void run_gemm(const KernelTable& table, const WeightView& weight, const Problem& problem, const Epilogue& epilogue,
              int threads) {
    if (problem.m == 0 || weight.n == 0) return;
    threads = std::max(threads, 1);
    const Operand operand = table.gemm_operand[static_cast<int>(problem.dtype)];
    const std::int64_t padded_k = weight.steps * step_k;
    const std::int64_t row_bytes = operand.bytes(padded_k);
    const std::int64_t slice_steps = slice_bytes_a_row / operand.bytes(step_k);
    const std::int64_t panel_stride = slice_steps * step_k * tile_rows * operand.element_bytes;
    const std::int64_t rows_a_pass = std::clamp<std::int64_t>(
        packed_bytes_a_pass / std::max<std::int64_t>(row_bytes, 1), table.gemm_rows, most_rows_a_pass);
    static thread_local AlignedBuffer packed_x;

    for (std::int64_t first = 0; first < problem.m; first += rows_a_pass) {
        const std::int64_t last = std::min(first + rows_a_pass, problem.m);
        const std::vector<StagedRow> staged = plan_rows(table, problem, first, last, threads);
        const auto rows = static_cast<std::int64_t>(staged.size());
        const RowBlocks blocks(rows, table.gemm_rows);
        packed_x.reserve(static_cast<std::size_t>(rows * row_bytes));
        std::uint8_t* x = packed_x.bytes();
        const auto pack = [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t block = begin; block < end; ++block) {
                const int size = blocks.size(block);
                for (int r = 0; r < size; ++r) {
                    const StagedRow& row = staged[static_cast<std::size_t>(blocks.begin(block) + r)];
                    table.pack_gemm(problem.dtype, row_of(problem, row.row), problem.k, row.band, operand,
                                    x + blocks.begin(block) * row_bytes + 4 * r, size);
                }
            }
        };
        parallel_ranges(blocks.count, threads_for(rows * problem.k, threads), pack);

        // Smaller panels where the columns would not fill the threads; the width changes no sum.
        const std::int64_t tiles_a_thread = (weight.tiles + threads - 1) / threads;
        const std::int64_t width = std::clamp<std::int64_t>(tiles_a_thread / 4 / table.gemm_tiles * table.gemm_tiles,
                                                            table.gemm_tiles, panel_tiles);
        const auto multiply = [&](std::int64_t first_panel, std::int64_t last_panel) {
            static thread_local AlignedBuffer scratch;
            const std::int64_t begin = first_panel * width;
            const std::int64_t end = std::min(last_panel * width, weight.tiles);
            const std::int64_t panel_bytes = panel_tiles * panel_stride;
            const std::int64_t sum_bytes = rows * panel_columns * static_cast<std::int64_t>(sizeof(float));
            scratch.reserve(static_cast<std::size_t>(panel_bytes + sum_bytes));
            std::uint8_t* panel = scratch.bytes();
            auto* sums = reinterpret_cast<float*>(panel + panel_bytes);
            for (std::int64_t tile = begin; tile < end; tile += width) {
                const int tiles = static_cast<int>(std::min(width, end - tile));
                if (weight.steps == 0) std::memset(sums, 0, static_cast<std::size_t>(sum_bytes));
                for (std::int64_t step = 0; step < weight.steps; step += slice_steps) {
                    const std::int64_t steps = std::min(slice_steps, weight.steps - step);
                    for (int t = 0; t < tiles; ++t) {
                        std::uint8_t* to = panel + t * panel_stride;
                        if (weight.tiled) {
                            table.decode(tile_of(weight, tile + t) + step * step_bytes, steps, weight.plain_scales,
                                         operand.pairs(), to);
                        } else {
                            decode_canonical_panel(weight, tile + t, step, step + steps, operand.pairs(), to);
                        }
                    }
                    for (std::int64_t block = 0; block < blocks.count; ++block) {
                        const int size = blocks.size(block);
                        const std::uint8_t* x_slice =
                            x + blocks.begin(block) * row_bytes + size * operand.bytes(step * step_k);
                        float* block_sums = sums + blocks.begin(block) * panel_columns;
                        for (int t = 0; t < tiles; t += table.gemm_tiles) {
                            table.gemm_block(x_slice, operand, size, panel + t * panel_stride, panel_stride,
                                             std::min(table.gemm_tiles, tiles - t), steps * step_k, step > 0,
                                             block_sums + t * tile_rows, panel_columns);
                        }
                    }
                }
                const std::int64_t column = tile * tile_rows;
                finish_rows(table, problem, epilogue, staged, sums, panel_columns, column,
                            std::min<std::int64_t>(tiles * tile_rows, weight.n - column));
            }
        };
        parallel_ranges((weight.tiles + width - 1) / width, threads_for(weight.n * problem.k * rows, threads),
                        multiply);
    }
}

}  // namespace fp4linear::cpu
