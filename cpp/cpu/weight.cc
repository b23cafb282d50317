#include "cpu/weight.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cpu/aligned_buffer.h"
#include "formats/e2m1.h"
#include "formats/e4m3.h"

namespace fp4linear::cpu {
namespace {

// Nibbles 0, 2, 4, 6 of v, packed into 16 bits; and the inverse.
constexpr std::uint32_t gather_even_nibbles(std::uint32_t v) {
    v &= 0x0F0F0F0Fu;
    v = (v | (v >> 4)) & 0x00FF00FFu;
    return (v | (v >> 8)) & 0xFFFFu;
}
constexpr std::uint32_t scatter_even_nibbles(std::uint32_t v) {
    v = (v | (v << 8)) & 0x00FF00FFu;
    return (v | (v << 4)) & 0x0F0F0F0Fu;
}
static_assert(gather_even_nibbles(0xA7B6C5D4u) == 0x7654u && scatter_even_nibbles(0x7654u) == 0x07060504u);

// Eight consecutive codes of a row (four bytes, little endian) to a lane, and back.
constexpr std::uint32_t lane_from_codes(std::uint32_t codes) {
    return gather_even_nibbles(codes) | (gather_even_nibbles(codes >> 4) << 16);
}
constexpr std::uint32_t codes_from_lane(std::uint32_t lane) {
    return scatter_even_nibbles(lane & 0xFFFFu) | (scatter_even_nibbles(lane >> 16) << 4);
}
static_assert(codes_from_lane(lane_from_codes(0x12345678u)) == 0x12345678u);

std::uint32_t load_little_endian(const std::uint8_t* bytes, std::int64_t count) {
    std::uint32_t value = 0;
    for (std::int64_t i = 0; i < count; ++i) value |= static_cast<std::uint32_t>(bytes[i]) << (8 * i);
    return value;
}
void store_little_endian(std::uint8_t* bytes, std::uint32_t value, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) bytes[i] = static_cast<std::uint8_t>(value >> (8 * i));
}

constexpr int lane_bytes = 4;  // eight codes
constexpr int lane_k = 8;
constexpr int vectors = step_k / lane_k;  // of a step

constexpr std::int64_t tiles_of(std::int64_t n) { return (n + tile_rows - 1) / tile_rows; }
constexpr std::int64_t steps_of(std::int64_t k) { return (k + step_k - 1) / step_k; }

// Offset in a step of the scale of (row, group).
constexpr int scale_offset(int row, int group) {
    return step_code_bytes + (group / 2) * 2 * tile_rows + 2 * row + group % 2;
}

}  // namespace

WeightView view_of(std::int64_t n, std::int64_t k, int block_size, bool tiled, bool plain_scales,
                   const std::uint8_t* codes, const std::uint8_t* scales) {
    return {.n = n,
            .k = k,
            .block_size = block_size,
            .tiles = tiles_of(n),
            .steps = steps_of(k),
            .tiled = tiled,
            .plain_scales = plain_scales,
            .codes = codes,
            .scales = scales};
}

bool can_tile(std::int64_t k, int block_size) {
    return block_size % group_k == 0 || blocks_per_row(k, block_size) <= 1;
}

std::size_t tiled_size(std::int64_t n, std::int64_t k) {
    return static_cast<std::size_t>(tiles_of(n) * steps_of(k)) * step_bytes;
}

bool has_plain_scales(const std::uint8_t* scales, std::int64_t count) {
    return std::all_of(scales, scales + count, [](std::uint8_t s) { return s <= 0x7E; });
}

void tile_weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales,
                 std::uint8_t* tiled) {
    const std::int64_t blocks = blocks_per_row(k, block_size);
    const std::int64_t row_bytes = k / 2;
    const std::int64_t steps = steps_of(k);
    if (const std::size_t total = tiled_size(n, k); total > 0) std::memset(tiled, 0, total);
    for (std::int64_t row = 0; row < n; ++row) {
        std::uint8_t* tile = tiled + static_cast<std::size_t>(row / tile_rows * steps) * step_bytes;
        const int r = static_cast<int>(row % tile_rows);
        const std::uint8_t* source = b + row * row_bytes;
        for (std::int64_t lane = 0; lane * lane_bytes < row_bytes; ++lane) {
            const std::int64_t at = lane * lane_bytes;
            const std::uint32_t value =
                lane_from_codes(load_little_endian(source + at, std::min<std::int64_t>(lane_bytes, row_bytes - at)));
            std::uint8_t* vector = tile + lane / vectors * step_bytes + lane % vectors * tile_rows * lane_bytes;
            store_little_endian(vector + r * lane_bytes, value, lane_bytes);
        }
        for (std::int64_t group = 0; group * group_k < k; ++group) {
            const std::int64_t block = blocks <= 1 ? 0 : group / (block_size / group_k);
            tile[group / step_groups * step_bytes + scale_offset(r, static_cast<int>(group % step_groups))] =
                scales[row * blocks + block];
        }
    }
}

void untile_weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* tiled, std::uint8_t* b,
                   std::uint8_t* scales) {
    const std::int64_t blocks = blocks_per_row(k, block_size);
    const std::int64_t row_bytes = k / 2;
    const std::int64_t steps = steps_of(k);
    for (std::int64_t row = 0; row < n; ++row) {
        const std::uint8_t* tile = tiled + static_cast<std::size_t>(row / tile_rows * steps) * step_bytes;
        const int r = static_cast<int>(row % tile_rows);
        for (std::int64_t lane = 0; lane * lane_bytes < row_bytes; ++lane) {
            const std::int64_t at = lane * lane_bytes;
            const std::uint8_t* vector = tile + lane / vectors * step_bytes + lane % vectors * tile_rows * lane_bytes;
            const std::uint32_t value = load_little_endian(vector + r * lane_bytes, lane_bytes);
            store_little_endian(b + row * row_bytes + at, codes_from_lane(value),
                                std::min<std::int64_t>(lane_bytes, row_bytes - at));
        }
        for (std::int64_t block = 0; block < blocks; ++block) {
            const std::int64_t group = blocks <= 1 ? 0 : block * (block_size / group_k);
            scales[row * blocks + block] =
                tile[group / step_groups * step_bytes + scale_offset(r, static_cast<int>(group % step_groups))];
        }
    }
}

struct Weight::Impl {
    WeightView view;
    AlignedBuffer codes;
    AlignedBuffer scales;
    std::size_t bytes_held = 0;
};

Weight::Weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales)
    : impl_(std::make_unique<Impl>()) {
    Impl& w = *impl_;
    const std::int64_t blocks = blocks_per_row(k, block_size);
    const bool tiled = can_tile(k, block_size);
    if (tiled) {
        w.codes.reserve(tiled_size(n, k));
        tile_weight(n, k, block_size, b, scales, w.codes.bytes());
        w.bytes_held = w.codes.capacity();
    } else {
        w.codes.reserve(static_cast<std::size_t>(n * (k / 2)));
        w.scales.reserve(static_cast<std::size_t>(n * blocks));
        std::copy_n(b, n * (k / 2), w.codes.bytes());
        std::copy_n(scales, n * blocks, w.scales.bytes());
        w.bytes_held = w.codes.capacity() + w.scales.capacity();
    }
    w.view = view_of(n, k, block_size, tiled, has_plain_scales(scales, n * blocks), w.codes.bytes(), w.scales.bytes());
}

Weight::~Weight() = default;

WeightView Weight::view() const { return impl_->view; }

void Weight::canonical(std::uint8_t* b, std::uint8_t* scales) const {
    const WeightView& w = impl_->view;
    if (w.tiled) return untile_weight(w.n, w.k, w.block_size, w.codes, b, scales);
    std::copy_n(w.codes, w.n * (w.k / 2), b);
    std::copy_n(w.scales, w.n * blocks_per_row(w.k, w.block_size), scales);
}

std::size_t Weight::nbytes() const { return impl_->bytes_held; }

void decode_canonical_panel(const WeightView& w, std::int64_t tile, std::int64_t first_step, std::int64_t last_step,
                            bool pairs, void* panel) {
    const std::int64_t first = first_step * step_k;
    const std::int64_t last = last_step * step_k;
    const std::int64_t blocks = blocks_per_row(w.k, w.block_size);
    for (int r = 0; r < tile_rows; ++r) {
        const std::int64_t row = tile * tile_rows + r;
        const std::uint8_t* codes = w.codes + row * (w.k / 2);
        const std::uint8_t* scales = w.scales + row * blocks;
        std::int64_t block = first / w.block_size;
        std::int64_t block_end = (block + 1) * w.block_size;
        for (std::int64_t k = first; k < last; ++k) {
            float value = 0.0f;
            if (row < w.n && k < w.k) {
                if (k == block_end) {
                    ++block;
                    block_end += w.block_size;
                }
                value = e2m1_values[e2m1_code(codes, k)] * e4m3_values[scales[block]] * 0x1p-8f;
            }
            const std::int64_t at = k - first;
            if (pairs) {
                // Exact: the product has at most six significant bits.
                const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
                static_cast<std::uint16_t*>(panel)[(at / 2 * tile_rows + r) * 2 + at % 2] = bits;
            } else {
                static_cast<float*>(panel)[at * tile_rows + r] = value;
            }
        }
    }
}

}  // namespace fp4linear::cpu
