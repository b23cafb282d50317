#include "borrowed_weight.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <tuple>

#include "cpu/aligned_buffer.h"
#include "cpu/cpu.h"
#include "cpu/layout.h"
#include "cpu/thread_pool.h"
#include "cuda/borrowed.h"
#include "cuda/prepacked.h"
#include "linear.h"

namespace fp4linear {
namespace {

static_assert(unit_rows == cpu::tile_rows && unit_k == cpu::step_k && unit_bytes == cpu::step_bytes);
static_assert(unit_rows == cuda::prepacked::unit_rows && unit_k == cuda::prepacked::unit_k &&
              unit_bytes == cuda::prepacked::unit_bytes);

WeightForm planned_form(const BorrowedWeight& w) {
    if (!w.cuda_device) return WeightForm::any;
    return w.form == BorrowedForm::prepacked ? WeightForm::prepacked : WeightForm::canonical;
}

struct Planned {
    PathId path = PathId::cpu_gemv;
    int sm_count = 0;
};

Planned plan_anew(const BorrowedWeight& w, const Problem& p, const Options& options) {
    const PlanQuery query{
        .m = p.m, .n = p.n, .k = p.k, .block_size = p.block_size, .dtype = p.dtype, .form = planned_form(w)};
    DeviceSpec device =
        w.cuda_device ? cuda::device_spec(*w.cuda_device) : cpu_device_spec(*choose_isa(options.cpu_isa), p.dtype);
    // No global scale of x is passed here.
    device.kernels &= ~(path_bit(PathId::native_nvfp4) | path_bit(PathId::native_emulated));
    device.native_reason = "only an Fp4Linear holds the swizzled scales that it reads";
    if (options.log)
        std::fprintf(stderr, "fp4linear: %s\n", describe(make_plan(query, device, options), query).c_str());
    return {choose_path(query, device, options), device.sm_count};
}

// Planning costs as much as a launch, and a program repeats its calls.
Planned plan_of(const BorrowedWeight& w, const Problem& p, const Options& options) {
    if (options.log) return plan_anew(w, p, options);
    using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, int, int, int, int, bool, std::string>;
    struct Entry {
        Key key{-1, 0, 0, 0, 0, 0, 0, false, {}};
        Planned planned;
    };
    constexpr std::size_t entries = 128;  // a model has a handful of shapes, each with a few M
    thread_local std::array<Entry, entries> known;
    const auto mixed =
        (static_cast<std::uint64_t>(p.m) * 31 + static_cast<std::uint64_t>(p.n) * 7 + static_cast<std::uint64_t>(p.k)) *
        0x9E3779B97F4A7C15u;
    Entry& entry = known[mixed >> 57];
    static_assert(entries == std::size_t{1} << (64 - 57));
    const auto key =
        std::make_tuple(p.m, p.n, p.k, p.block_size, static_cast<int>(p.dtype), static_cast<int>(planned_form(w)),
                        w.cuda_device.value_or(-1), options.batch_invariant, std::cref(options.path));
    if (entry.key != key) entry = {Key(key), plan_anew(w, p, options)};
    return entry.planned;
}

void run_on_cpu(PathId path, const BorrowedWeight& w, const Problem& p, const Options& options) {
    const bool tiled = w.form == BorrowedForm::tiled;
    const std::uint8_t* codes = w.weight;
    // Frameworks align what they allocate, but a slice of an array may start anywhere.
    cpu::AlignedBuffer aligned;
    if (tiled && reinterpret_cast<std::uintptr_t>(codes) % cpu::tiled_alignment != 0) {
        const std::size_t bytes = cpu::tiled_size(p.n, p.k);
        aligned.reserve(bytes);
        std::memcpy(aligned.bytes(), codes, bytes);
        codes = aligned.bytes();
    }
    // What the scales are is not known without reading them all; decoding any costs 6 % at M = 1 (4096 x 4096, bf16, in
    // the cache) and nothing that shows at M = 8.
    constexpr bool plain_scales = false;
    const cpu::WeightView view = cpu::view_of(p.n, p.k, p.block_size, tiled, plain_scales, codes, w.scales);
    const cpu::Epilogue epilogue{.scale2 = w.scale2, .per_row = true, .bias = w.bias};
    const int threads = options.num_threads > 0 ? options.num_threads : cpu::default_threads();
    const cpu::Isa& isa = *choose_isa(options.cpu_isa);
    (path == PathId::cpu_gemv ? isa.gemv : isa.gemm)(view, p, epilogue, threads);
}

namespace packing = cuda::prepacked;

// move(word of the unit, slice, pair, row, byte of b) for the two codes that each byte of the unit's first `rows` rows
// holds; b is where the unit starts in the canonical array.
template <class Unit, class Canonical, class Move>
void for_each_byte(Unit* unit, Canonical* b, std::int64_t row_bytes, int rows, Move move) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int slice = 0; slice < packing::unit_slices; ++slice) {
            for (int pair = 0; pair < 4; ++pair) {
                const packing::ElementOfUnit e = packing::element_of_code(lane, slice, pair, 0);
                if (e.row < rows)
                    move(unit + 16 * lane + 4 * slice, slice, pair, e.row, b + e.row * row_bytes + e.k / 2);
            }
        }
    }
}

constexpr unsigned scale_sign = 0x80;
constexpr unsigned both_code_signs = 0x88;

}  // namespace

const char* name_of(BorrowedForm form) {
    switch (form) {
        case BorrowedForm::canonical: return "canonical";
        case BorrowedForm::tiled: return "tiled";
        case BorrowedForm::prepacked: return "prepacked";
    }
    return "?";
}

std::string unmet_by_form(BorrowedForm form, std::int64_t k, int block_size) {
    if (form == BorrowedForm::tiled && !cpu::can_tile(k, block_size))
        return "the tiled form needs a block_size that is a multiple of 16, got " + std::to_string(block_size);
    if (form == BorrowedForm::prepacked && !packing::supports(k, block_size))
        return "the prepacked form needs block_size 16 and a K > 0 that is a multiple of 64, got block_size " +
               std::to_string(block_size) + " and K = " + std::to_string(k);
    return "";
}

std::optional<PathId> forward(const BorrowedWeight& w, const Problem& problem, const Options& options, void* stream) {
    if (problem.m == 0 || problem.n == 0) return std::nullopt;
    if (problem.k == 0) {
        if (w.cuda_device) {
            cuda::fill_with_bias(w, problem, stream);
        } else {
            fill_with_bias(problem, w.bias);
        }
        return std::nullopt;
    }
    const Planned planned = plan_of(w, problem, options);
    if (!w.cuda_device) {
        run_on_cpu(planned.path, w, problem, options);
        return planned.path;
    }
    const cuda::CallOptions call{
        .rows_per_block = gemv_scalar_rows_per_block(problem.m, problem.n, planned.sm_count, options.gemv_row_tiling),
        .batch_invariant = options.batch_invariant};
    cuda::run(planned.path, w, problem, call, stream);
    return planned.path;
}

void pack(BorrowedForm form, std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b,
          const std::uint8_t* scales, std::uint8_t* units) {
    if (form == BorrowedForm::tiled) return cpu::tile_weight(n, k, block_size, b, scales, units);
    const std::int64_t row_bytes = k / 2, blocks = k / packing::slice_k, units_a_tile = packing::k_units(k);
    const auto tiles = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t tile = begin; tile < end; ++tile) {
            const std::int64_t first = tile * unit_rows;
            const int rows = static_cast<int>(std::min<std::int64_t>(unit_rows, n - first));
            for (std::int64_t u = 0; u < units_a_tile; ++u) {
                std::uint8_t* unit = units + (tile * units_a_tile + u) * unit_bytes;
                const std::uint8_t* unit_scales = scales + first * blocks + u * packing::unit_slices;
                std::memset(unit, 0, unit_bytes);
                for_each_byte(unit, b + first * row_bytes + u * (unit_k / 2), row_bytes, rows,
                              [&](std::uint8_t* at, int slice, int pair, int row, const std::uint8_t* from) {
                                  const bool flip = (unit_scales[row * blocks + slice] & scale_sign) != 0;
                                  const unsigned codes = *from ^ (flip ? both_code_signs : 0u);
                                  const int sign = packing::code_sign_bit(pair);
                                  const int magnitude = packing::code_magnitude_shift(pair);
                                  std::uint32_t word = 0;
                                  std::memcpy(&word, at, sizeof(word));
                                  word |= packing::word_from_code(codes & 15u, sign, magnitude) |
                                          packing::word_from_code(codes >> 4, 16 + sign, 16 + magnitude);
                                  std::memcpy(at, &word, sizeof(word));
                              });
                for (int row = 0; row < rows; ++row)
                    for (int slice = 0; slice < packing::unit_slices; ++slice)
                        unit[packing::scale_position(row, slice, unit_k)] = unit_scales[row * blocks + slice];
            }
        }
    };
    cpu::parallel_ranges(packing::row_tiles(n), cpu::default_threads(), tiles);
}

void unpack(BorrowedForm form, std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* units,
            std::uint8_t* b, std::uint8_t* scales) {
    if (form == BorrowedForm::tiled) return cpu::untile_weight(n, k, block_size, units, b, scales);
    const std::int64_t row_bytes = k / 2, blocks = k / packing::slice_k, units_a_tile = packing::k_units(k);
    const auto tiles = [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t tile = begin; tile < end; ++tile) {
            const std::int64_t first = tile * unit_rows;
            const int rows = static_cast<int>(std::min<std::int64_t>(unit_rows, n - first));
            for (std::int64_t u = 0; u < units_a_tile; ++u) {
                const std::uint8_t* unit = units + (tile * units_a_tile + u) * unit_bytes;
                std::uint8_t* unit_scales = scales + first * blocks + u * packing::unit_slices;
                for (int row = 0; row < rows; ++row)
                    for (int slice = 0; slice < packing::unit_slices; ++slice)
                        unit_scales[row * blocks + slice] = unit[packing::scale_position(row, slice, unit_k)];
                for_each_byte(unit, b + first * row_bytes + u * (unit_k / 2), row_bytes, rows,
                              [&](const std::uint8_t* at, int slice, int pair, int row, std::uint8_t* to) {
                                  const bool flip = (unit_scales[row * blocks + slice] & scale_sign) != 0;
                                  const int sign = packing::code_sign_bit(pair);
                                  const int magnitude = packing::code_magnitude_shift(pair);
                                  std::uint32_t word = 0;
                                  std::memcpy(&word, at, sizeof(word));
                                  const unsigned codes = packing::code_from_word(word, sign, magnitude) |
                                                         packing::code_from_word(word, 16 + sign, 16 + magnitude) << 4;
                                  *to = static_cast<std::uint8_t>(codes ^ (flip ? both_code_signs : 0u));
                              });
            }
        }
    };
    cpu::parallel_ranges(packing::row_tiles(n), cpu::default_threads(), tiles);
}

}  // namespace fp4linear
