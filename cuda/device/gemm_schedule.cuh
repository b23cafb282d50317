// Which tiles, and which part of K of each, the workers of gemm_wgmma's kernels take: for the kernel and for host
// tests.
#pragma once
#include <algorithm>
#include <cstdint>

#include "formats/activation.h"  // FP4LINEAR_HOST_DEVICE

namespace fp4linear::cuda::device::gemm_wgmma {

// A worker is a block or a pair of blocks. Every worker takes `full_tiles` whole tiles; those from `shared_first` on
// are dealt out by K, in equal parts to `sharing_workers`.
struct Schedule {
    int k_units;
    int row_blocks;    // of the tile's rows
    int token_blocks;  // of the tile's tokens
    int raster;        // token blocks that are worked on together
    int full_tiles;
    int shared_first;
    int shared_tiles;
    int sharing_workers;
};

struct Tile {
    int row_block;
    int token_block;
};
FP4LINEAR_HOST_DEVICE inline Tile tile_at(const Schedule& p, int i) {
    if (p.token_blocks == 1) return {i, 0};
    const int group_tiles = p.raster * p.row_blocks;
    const int group = i / group_tiles;
    const int in_group = i - group * group_tiles;
    const int left = p.token_blocks - group * p.raster;
    const int width = left < p.raster ? left : p.raster;
    return {in_group / width, group * p.raster + in_group % width};
}

// Of `chunks` that `splits` blocks share out evenly, the first that is `rank`'s.
FP4LINEAR_HOST_DEVICE inline int first_owned(int rank, int splits, int chunks) {
    return (rank * chunks + splits - 1) / splits;
}

// A tile and a range of its K, in units.
struct Piece {
    int tile;
    int k_begin;
    int k_end;
};

// A worker's range of the shared tiles' K. Its last tile, where incomplete, is left to the worker that has that tile's
// end: a piece of another's tile. So a worker only ever waits for those before it, which were started before it and
// wait for nothing on the way to what it needs.
struct SharedRange {
    int first_tile;
    int first_k;  // where it begins in that tile
    int last_tile;
    int last_k;  // where it ends in that tile: 0 if it does not reach into it
};
FP4LINEAR_HOST_DEVICE inline std::int64_t shared_begin(const Schedule& p, int worker) {
    return static_cast<std::int64_t>(p.shared_tiles) * p.k_units * worker / p.sharing_workers;
}
FP4LINEAR_HOST_DEVICE inline SharedRange shared_range(const Schedule& p, int worker) {
    if (worker >= p.sharing_workers) return {0, 0, 0, 0};
    const std::int64_t begin = shared_begin(p, worker);
    const std::int64_t end = shared_begin(p, worker + 1);
    return {static_cast<int>(begin / p.k_units), static_cast<int>(begin % p.k_units), static_cast<int>(end / p.k_units),
            static_cast<int>(end % p.k_units)};
}
// The worker's i-th piece: what another finishes first, what needs others last. False after the last one.
FP4LINEAR_HOST_DEVICE inline bool piece_at(const Schedule& p, const SharedRange& r, int worker, int workers, int i,
                                           Piece& piece) {
    if (r.last_k != 0) {
        if (i == 0) {
            piece = {p.shared_first + r.last_tile, r.first_tile == r.last_tile ? r.first_k : 0, r.last_k};
            return true;
        }
        --i;
    }
    if (i < p.full_tiles) {
        piece = {i * workers + worker, 0, p.k_units};
        return true;
    }
    i -= p.full_tiles;
    const int first_whole = r.first_tile + (r.first_k != 0 ? 1 : 0);
    const int whole = r.last_tile - first_whole;
    if (i < whole) {
        piece = {p.shared_first + first_whole + i, 0, p.k_units};
        return true;
    }
    if (i == (whole > 0 ? whole : 0) && r.first_k != 0 && r.last_tile > r.first_tile) {
        piece = {p.shared_first + r.first_tile, r.first_k, p.k_units};
        return true;
    }
    return false;
}

// The first of the workers that hold a part of the shared tile whose end is `worker`'s.
FP4LINEAR_HOST_DEVICE inline int first_sharer(const Schedule& p, int tile, int worker) {
    const std::int64_t tile_begin = static_cast<std::int64_t>(tile - p.shared_first) * p.k_units;
    int first = worker - 1;
    while (shared_begin(p, first) > tile_begin) --first;
    return first;
}

struct Sharing {
    int least_units;  // of K, for each worker that shares tiles
    bool extra_wave;  // a wave of whole tiles joins those that are shared
    bool even;        // the same number of workers for every shared tile
};
// Deals out all tiles to at most so many workers. How many there are.
inline int share_tiles(Schedule& s, int workers, const Sharing& c) {
    const int tiles = s.row_blocks * s.token_blocks;
    s.full_tiles = tiles / workers;
    s.shared_tiles = tiles % workers;
    if (s.shared_tiles > 0 && s.full_tiles > 0 && c.extra_wave) {
        --s.full_tiles;
        s.shared_tiles += workers;
    }
    s.shared_first = tiles - s.shared_tiles;
    const std::int64_t units = static_cast<std::int64_t>(s.shared_tiles) * s.k_units;
    const std::int64_t most = std::max<std::int64_t>(1, units / std::max(1, c.least_units));
    s.sharing_workers = static_cast<int>(std::min<std::int64_t>(workers, most));
    if (c.even && s.shared_tiles > 0 && s.sharing_workers >= s.shared_tiles)
        s.sharing_workers -= s.sharing_workers % s.shared_tiles;
    return s.full_tiles == 0 ? s.sharing_workers : workers;
}

}  // namespace fp4linear::cuda::device::gemm_wgmma
