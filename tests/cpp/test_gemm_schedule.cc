// What the workers of gemm_wgmma's kernels take: every tile once and all of its K, and waits that always end.
#include <cstddef>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/device/gemm_schedule.cuh"

namespace {

using namespace fp4linear::cuda::device::gemm_wgmma;

std::vector<Piece> pieces_of(const Schedule& s, int worker, int workers) {
    std::vector<Piece> pieces;
    const SharedRange range = shared_range(s, worker);
    Piece piece{};
    for (int i = 0; piece_at(s, range, worker, workers, i, piece); ++i) pieces.push_back(piece);
    return pieces;
}

// A part of a tile without the tile's end goes to the worker that has the end.
bool foreign(const Schedule& s, const Piece& piece) { return piece.k_end < s.k_units; }

void check_schedule(const Schedule& s, int workers) {
    const int tiles = s.row_blocks * s.token_blocks;
    std::vector<std::vector<bool>> done(static_cast<std::size_t>(tiles),
                                        std::vector<bool>(static_cast<std::size_t>(s.k_units)));
    std::vector<int> given(static_cast<std::size_t>(workers), -1);  // the tile of a worker's foreign part
    std::set<std::pair<int, int>> awaited;                          // worker, tile
    for (int worker = 0; worker < workers; ++worker) {
        const std::vector<Piece> pieces = pieces_of(s, worker, workers);
        CHECK(!pieces.empty());  // no worker is started for nothing
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = pieces[i];
            CHECK(piece.tile >= 0 && piece.tile < tiles && piece.k_begin >= 0 && piece.k_begin < piece.k_end);
            for (int k = piece.k_begin; k < piece.k_end; ++k) {
                const auto tile = static_cast<std::size_t>(piece.tile);
                CHECK(!done[tile][static_cast<std::size_t>(k)]);
                done[tile][static_cast<std::size_t>(k)] = true;
            }
            if (foreign(s, piece)) {  // first, so that nobody waits for what waits itself
                CHECK(i == 0);
                given[static_cast<std::size_t>(worker)] = piece.tile;
            } else if (piece.k_begin > 0) {  // last: it waits
                CHECK(i + 1 == pieces.size());
                const int first = first_sharer(s, piece.tile, worker);
                CHECK(first >= 0 && first < worker);
                for (int other = first; other < worker; ++other) CHECK(awaited.insert({other, piece.tile}).second);
            }
        }
    }
    for (const auto& tile : done)
        for (const bool unit : tile) CHECK(unit);
    // Each part that is given is awaited by one worker, and no other is: the flags are zero again at the end.
    std::size_t parts = 0;
    for (int worker = 0; worker < workers; ++worker)
        if (given[static_cast<std::size_t>(worker)] >= 0) {
            ++parts;
            CHECK(awaited.count({worker, given[static_cast<std::size_t>(worker)]}) == 1);
        }
    CHECK(parts == awaited.size());
}

void check_tiles(const Schedule& s) {
    std::set<std::pair<int, int>> seen;
    for (int i = 0; i < s.row_blocks * s.token_blocks; ++i) {
        const Tile tile = tile_at(s, i);
        CHECK(tile.row_block >= 0 && tile.row_block < s.row_blocks);
        CHECK(tile.token_block >= 0 && tile.token_block < s.token_blocks);
        CHECK(seen.insert({tile.row_block, tile.token_block}).second);
    }
}

void check_chunks() {
    for (int chunks = 8; chunks <= 128; chunks *= 2)
        for (int splits = 2; splits <= 8; ++splits) {
            CHECK(first_owned(0, splits, chunks) == 0 && first_owned(splits, splits, chunks) == chunks);
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const int owner = chunk * splits / chunks;  // as the kernel finds it
                CHECK(first_owned(owner, splits, chunks) <= chunk && chunk < first_owned(owner + 1, splits, chunks));
            }
        }
}

}  // namespace

int main() {
    check_chunks();
    std::mt19937 random(7);
    const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
    for (int i = 0; i < 3000; ++i) {
        Schedule s{};
        s.k_units = draw(0, 3) == 0 ? draw(1, 300) : draw(1, 40);
        s.row_blocks = draw(1, 60);
        s.token_blocks = draw(0, 1) == 0 ? 1 : draw(1, 9);
        s.raster = draw(1, s.token_blocks);
        check_tiles(s);
        const int sms = draw(0, 2) == 0 ? draw(1, 160) : 132;
        const int most = draw(0, 3) == 0 ? s.row_blocks * s.token_blocks : sms;
        const Sharing sharing{draw(0, 4) == 0 ? s.k_units : draw(1, 8), draw(0, 1) == 1, draw(0, 1) == 1};
        const int workers = share_tiles(s, most, sharing);
        CHECK(workers >= 1 && workers <= most);
        check_schedule(s, workers);
    }
    return check_report();
}
