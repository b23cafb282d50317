// Which tiles, and which part of K of each, the workers of gemm_wgmma's kernels take, and the shared memory of a block:
// for the kernel and for host tests.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/prepacked.h"

namespace fp4linear::cuda::device::gemm_wgmma {

inline constexpr int group_warps = 4;

// A worker is a block or a pair of blocks. Every worker takes `full_tiles` whole tiles; those from `shared_first` on
// are dealt out by K: in equal parts to `sharing_workers`, or, with helpers, each to a worker of its own but for its
// first `helper_k`, which a helper takes of `helped` tiles.
struct Schedule {
    int k_units;
    int row_blocks;    // of the tile's rows
    int token_blocks;  // of the tile's tokens
    int raster;        // token blocks that are worked on together
    int full_tiles;
    int shared_first;
    int shared_tiles;
    int sharing_workers;
    int helpers;  // the first workers; those of the tiles follow
    int helped;
    int helper_k;
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
// A worker's i-th piece, with helpers.
FP4LINEAR_HOST_DEVICE inline bool piece_with_helpers(const Schedule& p, int worker, int workers, int i, Piece& piece) {
    const int first = worker * p.helped;
    const int left = p.shared_tiles - first;
    const int parts = worker >= p.helpers ? 0 : left < p.helped ? left : p.helped;
    if (i < parts) {
        piece = {p.shared_first + first + i, 0, p.helper_k};
        return true;
    }
    i -= parts;
    if (i < p.full_tiles) {
        piece = {i * workers + worker, 0, p.k_units};
        return true;
    }
    const int own = worker - p.helpers;
    piece = {p.shared_first + own, p.helper_k, p.k_units};
    return i == p.full_tiles && own >= 0 && own < p.shared_tiles;
}

// The worker's i-th piece: what another finishes first, what needs others last. False after the last one. Only kernels
// that `may_help` take schedules with helpers.
template <bool may_help>
FP4LINEAR_HOST_DEVICE bool piece_at(const Schedule& p, const SharedRange& r, int worker, int workers, int i,
                                    Piece& piece) {
    if (may_help && p.helpers > 0) return piece_with_helpers(p, worker, workers, i, piece);
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

// Parts of another's tile have numbers, below that of the workers: where a worker's part of the tile goes, and which
// parts the worker that has a shared tile's end adds, in the order of K.
template <bool may_help>
FP4LINEAR_HOST_DEVICE int given_part(const Schedule& p, int tile, int worker) {
    return may_help && p.helpers > 0 ? p.helpers + tile - p.shared_first : worker;
}
struct PartRange {
    int first;
    int end;
};
template <bool may_help>
FP4LINEAR_HOST_DEVICE PartRange awaited_parts(const Schedule& p, int tile, int worker) {
    if (may_help && p.helpers > 0) return {worker, worker + 1};
    const std::int64_t tile_begin = static_cast<std::int64_t>(tile - p.shared_first) * p.k_units;
    int first = worker - 1;
    while (shared_begin(p, first) > tile_begin) --first;
    return {first, worker};
}

// Kernels of so many tokens may have helpers: smaller tiles have no registers for it.
inline constexpr int least_helped_tokens = 96;
struct Sharing {
    int least_units;     // of K, for each worker that shares tiles
    bool extra_wave;     // a wave of whole tiles joins those that are shared
    bool even;           // the same number of workers for every shared tile
    int lead_of_a_part;  // helpers, where workers are left over; what a part costs a helper, in units. < 0: none
};
// Helpers for s.shared_tiles, so that they end a little before the others need their parts. False where workers are
// too few, or enough for two a tile, or K is too short.
inline bool assign_helpers(Schedule& s, int workers, int lead_of_a_part) {
    const int spare = workers - s.shared_tiles;
    if (s.shared_tiles == 0 || spare <= 0 || spare >= s.shared_tiles) return false;
    s.helped = (s.shared_tiles + spare - 1) / spare;
    s.helpers = (s.shared_tiles + s.helped - 1) / s.helped;
    s.helper_k = (s.k_units - s.helped * lead_of_a_part) / (s.helped + 1);
    if (s.helper_k > 0) return true;
    s.helped = s.helpers = s.helper_k = 0;
    return false;
}
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
    s.helped = s.helpers = s.helper_k = s.sharing_workers = 0;
    if (c.lead_of_a_part >= 0 && assign_helpers(s, workers, c.lead_of_a_part))
        return s.full_tiles == 0 ? s.helpers + s.shared_tiles : workers;
    const std::int64_t units = static_cast<std::int64_t>(s.shared_tiles) * s.k_units;
    const std::int64_t most = std::max<std::int64_t>(1, units / std::max(1, c.least_units));
    s.sharing_workers = static_cast<int>(std::min<std::int64_t>(workers, most));
    if (c.even && s.shared_tiles > 0 && s.sharing_workers >= s.shared_tiles)
        s.sharing_workers -= s.sharing_workers % s.shared_tiles;
    return s.full_tiles == 0 ? s.sharing_workers : workers;
}

// y on its way from fragments to rows, in two buffers. A warp has its 16 rows and 16 tokens to itself; of large tiles a
// warpgroup stores 64 rows of 32 tokens together: whole lines of 128 bytes.
FP4LINEAR_HOST_DEVICE constexpr bool stores_lines(int tokens, bool clustered) { return tokens >= 128 && !clustered; }
FP4LINEAR_HOST_DEVICE constexpr int staging_tokens(int tokens, bool clustered) {
    return stores_lines(tokens, clustered) ? 32 : 16;
}
FP4LINEAR_HOST_DEVICE constexpr int staging_bytes_of(int tokens, bool clustered) {
    return 2 * staging_tokens(tokens, clustered) * prepacked::unit_rows * 2;
}
// Where the sums that a cluster's other blocks send have their place: where they are too much for one of their own, the
// ring's.
FP4LINEAR_HOST_DEVICE constexpr bool parts_in_ring(int tokens) { return tokens > 64; }
inline constexpr int chunk_bytes = 512;  // what a block sends at once: a warp's 16 rows x 8 tokens in fp32

// Shared memory of a block. 0: the parts of a cluster that go to the ring find no room there.
FP4LINEAR_HOST_DEVICE constexpr int shared_bytes(int tokens, int groups, int stage_units, int stages, int splits) {
    const int warps = groups * group_warps;
    const bool clustered = splits > 1;
    const int ring = stages * stage_units * (tokens * prepacked::unit_k * 2 + warps * prepacked::unit_bytes);
    const int chunks = tokens / 8 * warps;
    const int parts = clustered ? (chunks + splits - 1) / splits * (splits - 1) * chunk_bytes : 0;
    if (parts_in_ring(tokens) && parts > ring) return 0;
    return ring + warps * staging_bytes_of(tokens, clustered) + stages * 16 + 16 + (parts_in_ring(tokens) ? 0 : parts);
}

}  // namespace fp4linear::cuda::device::gemm_wgmma
