// What gemm_wgmma chooses for a product: a kernel that there is, that fits, and in places the one that was measured.
#include <cstdint>
#include <random>

#include "check.h"
#include "cuda/gemm_wgmma_choice.h"

namespace {

using namespace fp4linear::cuda::wgmma_choice;
using fp4linear::cuda::device::gemm_wgmma::chunk_bytes;
using fp4linear::cuda::device::gemm_wgmma::shared_bytes;
using fp4linear::cuda::prepacked::k_units;
using fp4linear::cuda::prepacked::unit_k;

constexpr int most_shared_bytes = 232448;  // of a block on SM90

bool exists(const Configuration& c) {
#define FP4LINEAR_IS(clustered, is_paired, tokens_, groups_, units, sets, slices, blocks)                      \
    if (c.tokens == tokens_ && c.groups == groups_ && c.stage_units == units && (c.splits > 1) == clustered && \
        c.paired == is_paired)                                                                                 \
        return true;
    FP4LINEAR_WGMMA_KERNELS(FP4LINEAR_IS)
#undef FP4LINEAR_IS
    return false;
}

void check_choice(const Problem& p) {
    const Configuration c = choose(p);
    const int shared = shared_bytes(c.tokens, c.groups, c.stage_units, c.stages, c.splits);
    CHECK(exists(c));
    CHECK(shared > 0 && shared <= most_shared_bytes);
    CHECK(c.splits >= 1 && c.splits <= 8);  // blocks of a portable cluster
    CHECK(c.splits == 1 || c.splits <= k_units(p.k));
    CHECK(c.blocks_an_sm == 0 || c.splits == 1);
    CHECK(c.lead_of_a_part < 0 || c.tokens >= least_helped_tokens);
    CHECK(!(c.extra_wave && c.even));

    // What comes of it: every block has work, helpers where they were meant, and the parts have room.
    const Dealt dealt = deal_out(p, c);
    const int warps = c.groups * group_warps;
    CHECK(dealt.blocks >= 1 && dealt.block_tokens >= 1 && dealt.block_tokens <= c.tokens);
    CHECK((dealt.schedule.helpers > 0) == (c.lead_of_a_part >= 0));
    CHECK(c.blocks_an_sm == 0 || dealt.blocks <= c.blocks_an_sm * p.sm_count);
    if (c.splits == 1 && dealt.schedule.shared_tiles > 0) {
        const std::int64_t part = std::int64_t{warps} * c.tokens / 8 * chunk_bytes;
        CHECK(dealt.blocks * part <= p.sm_count * std::int64_t{128} * 256 * 4);
        CHECK(dealt.blocks * warps * 4 <= 16384 || p.sm_count > 132);
    }
}

Configuration choice(std::int64_t n, std::int64_t k, std::int64_t m) { return choose({m, n, k, 132}); }

// Places where a change of the rules would cost time (docs/gemm_kernel_notes.md).
void check_measured() {
    const Configuration helped = choice(11008, 4096, 128);
    CHECK(helped.tokens == 128 && helped.lead_of_a_part >= 0);
    const Configuration two = choice(11008, 4096, 64);
    CHECK(two.tokens == 64 && two.splits == 2);
    const Configuration even = choice(6144, 4096, 64);
    CHECK(even.tokens == 64 && even.splits == 1 && even.even && even.blocks_an_sm == 3);
    const Configuration three = choice(4096, 4096, 64);
    CHECK(three.tokens == 64 && three.splits == 3);
    const Configuration six = choice(2048, 7168, 64);
    CHECK(six.tokens == 64 && six.splits == 6);
    const Configuration eight = choice(1536, 5120, 32);
    CHECK(eight.tokens == 32 && eight.splits == 8);
    const Configuration four = choice(1536, 5120, 48);
    CHECK(four.tokens == 32 && four.splits == 4);
    const Configuration pairs = choice(11008, 4096, 256);
    CHECK(pairs.tokens == 256 && pairs.paired && pairs.lead_of_a_part >= 0);
    CHECK(choice(14336, 4096, 128).lead_of_a_part < 0);  // a helper of six tiles would be late
    CHECK(choice(28672, 8192, 96).tokens == 96);
    CHECK(choice(28672, 8192, 192).tokens == 192);
    CHECK(choice(28672, 8192, 256).tokens == 256 && choice(28672, 8192, 256).paired);
    CHECK(choice(28672, 4096, 64).groups == 2);
}

// The bits of a row must not depend on M: neither may the parts of K.
void check_invariant() {
    for (const std::int64_t n : {64, 300, 4096, 9000, 30000})
        for (const std::int64_t k : {64, 1024, 4096, 17408})
            for (const std::int64_t m : {1, 16, 17, 33, 64, 65, 500})
                CHECK(choose({m, n, k, 132, true}).splits == choose({1, n, k, 132, true}).splits);
}

}  // namespace

int main() {
    check_measured();
    check_invariant();
    std::mt19937 random(3);
    const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
    for (int i = 0; i < 20000; ++i) {
        const int size = draw(4, 18);
        check_choice({draw(0, 1) == 0 ? draw(1, 300) : draw(1, 9000), draw(1, 1 << size),
                      unit_k * (draw(0, 1) == 0 ? draw(1, 40) : draw(1, 400)), draw(0, 2) == 0 ? draw(1, 160) : 132,
                      draw(0, 5) == 0});
    }
    return check_report();
}
