// What the workers of gemm_wgmma's kernels take: every tile once and all of its K, and waits that always end.
#include <cstddef>
#include <map>
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
    for (int i = 0; piece_at<true>(s, range, worker, workers, i, piece); ++i) pieces.push_back(piece);
    return pieces;
}

// A part of a tile without the tile's end goes to the worker that has the end.
bool foreign(const Schedule& s, const Piece& piece) { return piece.k_end < s.k_units; }

// A part of another's tile.
struct Given {
    Piece piece;
    int worker;
};

void check_schedule(const Schedule& s, int workers) {
    const int tiles = s.row_blocks * s.token_blocks;
    std::vector<std::vector<bool>> done(static_cast<std::size_t>(tiles),
                                        std::vector<bool>(static_cast<std::size_t>(s.k_units)));
    std::map<int, Given> given;
    for (int worker = 0; worker < workers; ++worker) {
        const std::vector<Piece> pieces = pieces_of(s, worker, workers);
        CHECK(!pieces.empty());  // no worker is started for nothing
        bool own = false;
        for (const Piece& piece : pieces) {
            CHECK(piece.tile >= 0 && piece.tile < tiles && piece.k_begin >= 0 && piece.k_begin < piece.k_end);
            for (int k = piece.k_begin; k < piece.k_end; ++k) {
                const auto tile = static_cast<std::size_t>(piece.tile);
                CHECK(!done[tile][static_cast<std::size_t>(k)]);
                done[tile][static_cast<std::size_t>(k)] = true;
            }
            if (!foreign(s, piece)) {
                own = true;
                continue;
            }
            CHECK(!own);  // first, so that nobody waits for what waits itself
            const int part = given_part<true>(s, piece.tile, worker);
            CHECK(part >= 0 && part < workers);  // there is room for so many
            CHECK(given.insert({part, {piece, worker}}).second);
        }
    }
    for (const auto& tile : done)
        for (const bool unit : tile) CHECK(unit);
    // Each part that is given is awaited once, and no other is: the flags are zero again at the end.
    std::size_t awaited = 0;
    for (int worker = 0; worker < workers; ++worker) {
        const std::vector<Piece> pieces = pieces_of(s, worker, workers);
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = pieces[i];
            if (foreign(s, piece) || piece.k_begin == 0) continue;
            CHECK(i + 1 == pieces.size());  // last: it waits
            const PartRange parts = awaited_parts<true>(s, piece.tile, worker);
            int k = 0;  // in the order of K, up to where the worker's own begins
            for (int part = parts.first; part < parts.end; ++part, ++awaited) {
                const auto found = given.find(part);
                CHECK(found != given.end());
                if (found == given.end()) continue;
                CHECK(found->second.piece.tile == piece.tile && found->second.piece.k_begin == k);
                CHECK(found->second.worker < worker);  // which was started before
                k = found->second.piece.k_end;
            }
            CHECK(k == piece.k_begin);
        }
    }
    CHECK(awaited == given.size());
}

// Helpers end ahead of the workers that wait for them, but for what does not divide.
void check_helpers() {
    Schedule s{};
    s.k_units = 64;
    s.row_blocks = 86;
    s.token_blocks = s.raster = 1;
    CHECK(share_tiles(s, 132, {4, false, false, 2}) == 129);
    CHECK(s.helpers == 43 && s.helped == 2 && s.helper_k == 20 && s.full_tiles == 0 && s.shared_tiles == 86);
    for (const int lead : {0, 1, 3, 5})
        for (int tiles = 67; tiles < 132; ++tiles) {
            s.shared_tiles = tiles;
            if (assign_helpers(s, 132, lead)) CHECK(s.helped * (s.helper_k + lead) <= s.k_units - s.helper_k);
        }
    s.row_blocks = 86 + 132;
    CHECK(share_tiles(s, 132, {4, false, false, 2}) == 132);
    CHECK(s.helpers == 43 && s.helper_k == 20 && s.full_tiles == 1 && s.shared_tiles == 86);
    for (const int tiles : {132, 66, 12}) {  // nothing to share, two workers a tile, many
        s.row_blocks = tiles;
        share_tiles(s, 132, {4, false, false, 2});
        CHECK(s.helpers == 0);
    }
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
    check_helpers();
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
        const Sharing sharing{draw(0, 4) == 0 ? s.k_units : draw(1, 8), draw(0, 1) == 1, draw(0, 1) == 1, draw(-4, 8)};
        const int workers = share_tiles(s, most, sharing);
        CHECK(workers >= 1 && workers <= most);
        check_schedule(s, workers);
    }
    return check_report();
}
