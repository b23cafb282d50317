#include "cpu/weight.h"

#include <algorithm>
#include <bit>
#include <cstring>

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

// Offset in a step of the scale of (row, group).
constexpr int scale_offset(int row, int group) {
    return step_code_bytes + (group / 2) * 2 * tile_rows + 2 * row + group % 2;
}

}  // namespace

Weight::Weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales)
    : impl_(std::make_unique<Impl>()) {
    Impl& w = *impl_;
    w.n = n;
    w.k = k;
    w.block_size = block_size;
    w.tiles = (n + tile_rows - 1) / tile_rows;
    w.steps = (k + step_k - 1) / step_k;
    const std::int64_t blocks = blocks_per_row(k, block_size);
    const std::int64_t row_bytes = k / 2;
    w.tiled = block_size % group_k == 0 || blocks <= 1;
    w.plain_scales = std::all_of(scales, scales + n * blocks, [](std::uint8_t s) { return s <= 0x7E; });

    if (!w.tiled) {
        w.codes.reserve(static_cast<std::size_t>(n * row_bytes));
        w.scales.reserve(static_cast<std::size_t>(n * blocks));
        std::copy_n(b, n * row_bytes, w.codes.bytes());
        std::copy_n(scales, n * blocks, w.scales.bytes());
        w.bytes_held = w.codes.capacity() + w.scales.capacity();
        return;
    }

    const auto total = static_cast<std::size_t>(w.tiles * w.steps) * step_bytes;
    w.codes.reserve(total);
    w.bytes_held = w.codes.capacity();
    if (total > 0) std::memset(w.codes.bytes(), 0, total);
    for (std::int64_t row = 0; row < n; ++row) {
        std::uint8_t* tile = w.codes.bytes() + static_cast<std::size_t>(row / tile_rows * w.steps) * step_bytes;
        const int r = static_cast<int>(row % tile_rows);
        const std::uint8_t* source = b + row * row_bytes;
        for (std::int64_t lane = 0; lane * lane_bytes < row_bytes; ++lane) {
            const std::int64_t at = lane * lane_bytes;
            const std::uint32_t value =
                lane_from_codes(load_little_endian(source + at, std::min<std::int64_t>(lane_bytes, row_bytes - at)));
            constexpr int vectors = step_k / lane_k;
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

Weight::~Weight() = default;

void Weight::canonical(std::uint8_t* b, std::uint8_t* scales) const {
    const Impl& w = *impl_;
    const std::int64_t blocks = blocks_per_row(w.k, w.block_size);
    const std::int64_t row_bytes = w.k / 2;
    if (!w.tiled) {
        std::copy_n(w.codes.bytes(), w.n * row_bytes, b);
        std::copy_n(w.scales.bytes(), w.n * blocks, scales);
        return;
    }
    for (std::int64_t row = 0; row < w.n; ++row) {
        const std::uint8_t* tile = w.tile(row / tile_rows);
        const int r = static_cast<int>(row % tile_rows);
        for (std::int64_t lane = 0; lane * lane_bytes < row_bytes; ++lane) {
            const std::int64_t at = lane * lane_bytes;
            constexpr int vectors = step_k / lane_k;
            const std::uint8_t* vector = tile + lane / vectors * step_bytes + lane % vectors * tile_rows * lane_bytes;
            const std::uint32_t value = load_little_endian(vector + r * lane_bytes, lane_bytes);
            store_little_endian(b + row * row_bytes + at, codes_from_lane(value),
                                std::min<std::int64_t>(lane_bytes, row_bytes - at));
        }
        for (std::int64_t block = 0; block < blocks; ++block) {
            const std::int64_t group = blocks <= 1 ? 0 : block * (w.block_size / group_k);
            scales[row * blocks + block] =
                tile[group / step_groups * step_bytes + scale_offset(r, static_cast<int>(group % step_groups))];
        }
    }
}

std::size_t Weight::nbytes() const { return impl_->bytes_held; }

void decode_canonical_panel(const Weight::Impl& w, std::int64_t tile, std::int64_t first_step, std::int64_t last_step,
                            bool pairs, void* panel) {
    const std::int64_t first = first_step * step_k;
    const std::int64_t last = last_step * step_k;
    const std::int64_t blocks = blocks_per_row(w.k, w.block_size);
    for (int r = 0; r < tile_rows; ++r) {
        const std::int64_t row = tile * tile_rows + r;
        const std::uint8_t* codes = w.codes.bytes() + row * (w.k / 2);
        const std::uint8_t* scales = w.scales.bytes() + row * blocks;
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
