// Which tiles gemm_wgmma takes for a product, and how they and K are dealt out to blocks. For the launch and for host
// tests.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/device/gemm_schedule.cuh"
#include "cuda/prepacked.h"

namespace fp4linear::cuda::wgmma_choice {

using device::gemm_wgmma::assign_helpers;
using device::gemm_wgmma::group_warps;
using device::gemm_wgmma::least_helped_tokens;
using device::gemm_wgmma::Schedule;

struct Problem {
    std::int64_t m, n, k;
    int sm_count;
    bool batch_invariant = false;
};

struct Configuration {
    int tokens;
    int groups;
    int stage_units;
    int stages;
    int splits;
    int blocks_an_sm;  // persistent; 0: a block for every tile
    int raster;
    int least_units;          // of K for a block that shares tiles
    bool extra_wave;          // a wave of whole tiles joins those that are shared
    bool even;                // the same number of blocks for every shared tile
    bool paired = false;      // two blocks share x
    int lead_of_a_part = -1;  // see Sharing
};

// The kernels that there are: clustered, paired, tokens, warpgroups, units of a stage, sets of fragments, slices of a
// set, blocks that an SM is to hold.
// clang-format off
#define FP4LINEAR_WGMMA_KERNELS(kernel)      \
    kernel(false, false, 16, 1, 4, 2, 2, 3)  \
    kernel(false, false, 32, 1, 4, 2, 2, 3)  \
    kernel(false, false, 64, 1, 2, 2, 2, 3)  \
    kernel(false, false, 16, 2, 4, 2, 2, 2)  \
    kernel(false, false, 32, 2, 4, 2, 2, 2)  \
    kernel(false, false, 64, 2, 2, 2, 2, 2)  \
    kernel(false, false, 96, 2, 2, 2, 2, 1)  \
    kernel(false, false, 128, 2, 2, 2, 1, 1) \
    kernel(false, false, 192, 2, 1, 2, 1, 1) \
    kernel(false, false, 256, 2, 1, 2, 1, 1) \
    kernel(false, true, 256, 2, 1, 2, 1, 1)  \
    kernel(true, false, 16, 1, 4, 2, 2, 3)   \
    kernel(true, false, 32, 1, 4, 2, 2, 3)   \
    kernel(true, false, 64, 1, 2, 2, 2, 3)   \
    kernel(true, false, 128, 2, 2, 2, 1, 1)
// clang-format on

// What the choice rests on, measured on one H200: cycles of an SM for 64 rows x 16 K, and what a launch takes beside
// that (its start, the sums of shared tiles, y), where tiles are shared, where they are not (of more than 64 tokens),
// and for every further tile.
struct Cost {
    int tokens;
    double cycles;
    double shared_us;
    double whole_us;
    double tile_us;
    double helpers_save_us;  // of shared_us
};
inline constexpr int row_tiles_64 = 64 / prepacked::unit_rows;
inline constexpr Cost costs[] = {{16, 36, 3.5, 0, 0.1, 0},     {32, 42, 4.3, 0, 0.1, 0},  {64, 56, 5.4, 0, 1, 0},
                                 {96, 74, 6.4, 5, 1.6, 2.4},   {128, 80, 7, 4, 1.8, 2.6}, {192, 118, 9.5, 5, 2.2, 3},
                                 {256, 134, 11.5, 6, 2.6, 3.2}};
inline constexpr double cycles_a_us = 1800;
inline constexpr int short_k_units = 16;
// x beyond what the 60 MB of L2 hold, and so large that blocks which the hardware hands out gain on those that stay.
inline constexpr double cached_x_bytes = 36e6;
inline constexpr double large_x_bytes = 100e6;
inline constexpr double large_x_gain = 1.07;
inline constexpr int pair_waste = 16;  // row blocks for which a pair may have one too many
// Clusters of eight: the least K, and twice as much where smaller ones fill the GPU too.
inline constexpr int least_k_units_of_eight = 24;
// Of 64 rows x 16 K. Below, 16 tokens a tile and clusters of two pay; below, other clusters do; above, two warpgroups a
// block are better than one (half that with 32 tokens).
inline constexpr int few_steps_an_sm = 130;
inline constexpr int cluster_steps_an_sm = 200;
inline constexpr int small_tile_steps_an_sm = 1000;
inline constexpr int most_k_units_of_two = 96;  // clusters of two, with 64 tokens
// As many workers for every tile save the sums of a third, but may leave workers over: units of K that this is worth.
inline constexpr int even_units = 5;
inline constexpr int even_units_left_over = 3;
inline constexpr int most_helped = 3;     // tiles of a helper
inline constexpr int lead_of_a_part = 3;  // units of K that a helper's part of a tile costs it beside the product

inline Configuration whole_tiles(int tokens) {
    switch (tokens) {
        case 16: return {16, 2, 4, 4, 1, 0, 0, 1, false, false};
        case 32: return {32, 2, 4, 3, 1, 0, 0, 1, false, false};
        case 64: return {64, 2, 2, 4, 1, 0, 0, 1, false, false};
        case 96: return {96, 2, 2, 5, 1, 0, 0, 1, false, false};
        case 128: return {128, 2, 2, 5, 1, 0, 0, 1, false, false};
        case 192: return {192, 2, 1, 6, 1, 0, 0, 1, false, false};
        default: return {256, 2, 1, 5, 1, 0, 0, 1, false, false};
    }
}
// One warpgroup a block, three blocks an SM.
inline constexpr int small_blocks_an_sm = 3;
inline Configuration small_tiles(int tokens) {
    switch (tokens) {
        case 16: return {16, 1, 4, 4, 1, small_blocks_an_sm, 0, 4, false, false};
        case 32: return {32, 1, 4, 2, 1, small_blocks_an_sm, 0, 4, false, false};
        default: return {64, 1, 2, 3, 1, small_blocks_an_sm, 0, 4, false, false};
    }
}
inline Configuration cluster_of(Configuration c, std::int64_t blocks) {
    c.splits = static_cast<int>(blocks);
    c.blocks_an_sm = 0;
    return c;
}

// As many workers for each tile that whole waves leave over.
struct Even {
    std::int64_t workers;  // a tile; 0: none is left over
    double lost;           // units of K that the worker with most has beyond an equal part of all
};
inline Even share_evenly(std::int64_t tiles, std::int64_t workers, std::int64_t k_units) {
    const std::int64_t left_over = tiles % workers;
    if (left_over == 0) return {0, 0};
    const std::int64_t each = workers / left_over;
    const std::int64_t most = tiles / workers * k_units + (k_units + each - 1) / each;
    return {each, static_cast<double>(most) - static_cast<double>(tiles * k_units) / static_cast<double>(workers)};
}

// A layer's product as the choice sees it.
struct Work {
    std::int64_t m;
    std::int64_t rows_64;
    std::int64_t rows_128;
    int k_units;
    int sm_count;
    double x_bytes;

    explicit Work(const Problem& a)
        : m(a.m),
          rows_64((prepacked::row_tiles(a.n) + row_tiles_64 - 1) / row_tiles_64),
          rows_128((rows_64 + 1) / 2),
          k_units(static_cast<int>(prepacked::k_units(a.k))),
          sm_count(a.sm_count),
          x_bytes(static_cast<double>(a.m) * static_cast<double>(a.k) * 2) {}
    [[nodiscard]] std::int64_t blocks_of(int tokens) const { return (m + tokens - 1) / tokens; }
    [[nodiscard]] std::int64_t tiles_64(int tokens) const { return rows_64 * blocks_of(tokens); }
    [[nodiscard]] std::int64_t steps_an_sm(int tokens) const { return tiles_64(tokens) * k_units * 4 / sm_count; }
    // Two blocks share x.
    [[nodiscard]] bool paired(int tokens) const {
        return tokens == 256 && sm_count > 1 && rows_128 % 2 * pair_waste <= rows_128;
    }
    [[nodiscard]] std::int64_t tiles_128(int tokens) const {
        return (paired(tokens) ? (rows_128 + 1) / 2 : rows_128) * blocks_of(tokens);
    }
    [[nodiscard]] std::int64_t workers_128(int tokens) const { return paired(tokens) ? sm_count / 2 : sm_count; }
    // Helpers for the tiles of one wave. `schedule` says how many.
    [[nodiscard]] bool helped(int tokens, Schedule& schedule) const {
        const std::int64_t tiles = tiles_128(tokens);
        const std::int64_t workers = workers_128(tokens);
        if (tiles >= workers) return false;
        schedule = {};
        schedule.k_units = k_units;
        schedule.shared_tiles = static_cast<int>(tiles);
        return assign_helpers(schedule, static_cast<int>(workers), lead_of_a_part) && schedule.helped <= most_helped;
    }
};

// How the tiles of a product are dealt out.
enum class Dealing { shared, helped, whole };
struct Choice {
    int tokens = 0;
    Dealing dealing = Dealing::shared;
    double us = 0;
};
inline Choice choose_tokens(const Work& w) {
    Choice best;
    const auto offer = [&](int tokens, Dealing dealing, double us) {
        if (best.tokens == 0 || us < best.us) best = {tokens, dealing, us};
    };
    for (const Cost& cost : costs) {
        // Every further block of tokens decodes once more: only for little work.
        if (cost.tokens == 16 && w.m > 32 && w.steps_an_sm(16) > few_steps_an_sm) continue;
        const double unit_us = 4 * cost.cycles / cycles_a_us;
        const std::int64_t tiles = w.rows_128 * w.blocks_of(cost.tokens);
        const double shared_us = cost.shared_us +
                                 static_cast<double>(w.tiles_64(cost.tokens)) * w.k_units * unit_us / w.sm_count +
                                 std::max(0.0, static_cast<double>(tiles) / w.sm_count - 1) * cost.tile_us;
        offer(cost.tokens, Dealing::shared, shared_us);
        if (cost.tokens <= 64) continue;
        const std::int64_t waves = (tiles + w.sm_count - 1) / w.sm_count;
        const double whole_us = static_cast<double>(waves) * (cost.whole_us + 2 * w.k_units * unit_us);
        // More waves than one gain from blocks that stay, but for short sums, or an x that no cache holds.
        const bool worth_it = w.x_bytes > large_x_bytes
                                  ? whole_us < shared_us * large_x_gain
                                  : (waves == 1 || w.k_units <= short_k_units) && whole_us < shared_us;
        if (worth_it && (best.tokens == cost.tokens || whole_us < best.us))
            best = {cost.tokens, Dealing::whole, whole_us};
        Schedule schedule;
        if (w.helped(cost.tokens, schedule))
            offer(cost.tokens, Dealing::helped,
                  cost.shared_us - cost.helpers_save_us + 2 * (w.k_units - schedule.helper_k) * unit_us);
    }
    return best;
}

// How many blocks are to share a tile as a cluster, where the sums of blocks that stay would cost more. 1: none are.
inline std::int64_t cluster_of_small(const Work& w, int tokens) {
    const std::int64_t tiles = w.tiles_64(tokens);
    const std::int64_t steps = w.steps_an_sm(tokens);
    if (tokens < 64) {
        if (steps > cluster_steps_an_sm) return 1;
        if (tiles * 16 <= w.sm_count) return 8;
        if (tiles * 4 <= w.sm_count) return 4;
        if (tiles * 2 <= w.sm_count) return tokens == 32 ? 4 : 3;
        return tiles <= w.sm_count && steps <= few_steps_an_sm ? 2 : 1;
    }
    if (tiles * 40 <= w.sm_count * 9) return 8;  // of which fewer fit than of smaller ones
    if (tiles * 4 <= w.sm_count) return 6;
    if (tiles * 2 <= w.sm_count) return steps <= cluster_steps_an_sm ? 3 : 1;
    const bool two = tiles > w.sm_count && tiles * 2 <= small_blocks_an_sm * w.sm_count;
    return two && w.k_units <= most_k_units_of_two ? 2 : 1;
}

// Tiles of at most 64 tokens in blocks of one warpgroup.
inline Configuration choose_small(const Work& w, int tokens) {
    Configuration c = small_tiles(tokens);
    const std::int64_t tiles = w.tiles_64(tokens);
    const std::int64_t workers = std::int64_t{small_blocks_an_sm} * w.sm_count;
    if (tiles > w.sm_count && w.k_units <= short_k_units) {
        c = tiles > workers ? whole_tiles(tokens) : c;
        c.blocks_an_sm = 0;
        return c;
    }
    const std::int64_t splits = std::min<std::int64_t>(cluster_of_small(w, tokens), (w.k_units + 1) / 3);
    if (splits > 1) return cluster_of(c, splits);
    c.even = share_evenly(tiles, workers, w.k_units).lost < even_units;
    return c;
}

inline Configuration choose(const Problem& a) {
    const Work w(a);
    if (a.batch_invariant) {
        // How K is split depends on N and K alone. The tile does not matter to the bits.
        int splits = 1;
        while (splits < 8 && w.rows_64 * splits <= a.sm_count && splits * 8 <= w.k_units) splits *= 2;
        const int tokens = a.m <= 16 ? 16 : a.m <= 32 ? 32 : a.m <= 64 ? 64 : 128;
        return cluster_of(splits > 1 && tokens <= 64 ? small_tiles(tokens) : whole_tiles(tokens), splits);
    }
    const std::int64_t blocks_of_eight = w.rows_64 * w.blocks_of(32) * 8;
    if (blocks_of_eight <= std::int64_t{2} * a.sm_count &&
        w.k_units >= (blocks_of_eight > a.sm_count ? least_k_units_of_eight : 2 * least_k_units_of_eight))
        return cluster_of(small_tiles(32), 8);  // few tiles: many blocks for each
    const Choice choice = choose_tokens(w);
    const int tokens = choice.tokens;
    if (tokens <= 64) {
        const bool fit =
            w.tiles_64(tokens) <= std::int64_t{small_blocks_an_sm} * a.sm_count || w.k_units <= short_k_units;
        if (fit && w.steps_an_sm(tokens) < small_tile_steps_an_sm / (tokens == 32 ? 2 : 1))
            return choose_small(w, tokens);
    }
    Configuration c = whole_tiles(tokens);
    c.paired = w.paired(tokens);
    // x beyond the L2 cache: a few token tiles at a time.
    c.raster = w.x_bytes > large_x_bytes ? 8 : w.x_bytes > cached_x_bytes ? 4 : 0;
    if (choice.dealing == Dealing::whole) {
        // Short sums: blocks that stay bring the next tile while they store one.
        if (w.k_units <= short_k_units && w.rows_128 * w.blocks_of(tokens) > a.sm_count) {
            c.blocks_an_sm = 1;
            c.least_units = w.k_units;
        }
        return c;
    }
    c.blocks_an_sm = tokens <= 64 ? 2 : 1;
    c.least_units = 4;
    if (choice.dealing == Dealing::helped) {
        c.lead_of_a_part = lead_of_a_part;
        return c;
    }
    const std::int64_t workers = c.blocks_an_sm * w.workers_128(tokens);
    const std::int64_t tiles = w.tiles_128(tokens);
    const std::int64_t left_over = tiles % workers;
    const Even even = share_evenly(tiles, workers, w.k_units);
    c.even = left_over > 0 &&
             (tiles < workers ? even.lost < even_units : even.workers <= 2 && even.lost < even_units_left_over);
    // Many blocks for each left-over tile cost more than two for every tile of a wave.
    c.extra_wave =
        !c.even && tiles > workers && (left_over * 8 <= workers || (tiles < 2 * workers && left_over * 2 <= workers));
    return c;
}

// What a launch is made of.
struct Dealt {
    Schedule schedule{};
    int block_tokens = 0;  // that there are in a block of tokens: a multiple of 8, of a pair 16
    int blocks = 0;        // 0: the configuration is not for this product
};
inline Dealt deal_out(const Problem& a, const Configuration& c) {
    const int team = c.paired ? 2 : 1;
    const int rows = c.groups * group_warps * team;  // of W / 16
    Dealt dealt;
    Schedule& s = dealt.schedule;
    s.k_units = static_cast<int>(prepacked::k_units(a.k));
    s.row_blocks = static_cast<int>((prepacked::row_tiles(a.n) + rows - 1) / rows);
    s.token_blocks = static_cast<int>((a.m + c.tokens - 1) / c.tokens);
    s.raster = c.raster > 0 ? std::min(c.raster, s.token_blocks) : s.token_blocks;
    const std::int64_t most_tokens = (a.m + s.token_blocks - 1) / s.token_blocks;
    dealt.block_tokens = static_cast<int>((most_tokens + 8 * team - 1) / (8 * team) * (8 * team));
    const int tiles = s.row_blocks * s.token_blocks;
    if (c.splits > 1) {
        dealt.blocks = tiles * c.splits;
        return dealt;
    }
    const int workers = c.blocks_an_sm > 0 ? c.blocks_an_sm * a.sm_count / team : tiles;
    if (workers < 1 || (c.tokens < least_helped_tokens && c.lead_of_a_part >= 0)) return dealt;
    dealt.blocks = team * share_tiles(s, workers, {c.least_units, c.extra_wave, c.even, c.lead_of_a_part});
    return dealt;
}

}  // namespace fp4linear::cuda::wgmma_choice
