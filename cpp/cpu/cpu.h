// The CPU backend: a weight re-tiled once for the host, and the two paths that read it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "problem.h"

namespace fp4linear::cpu {

// What the epilogue applies to the fp32 sum of output n: round(scale2[n] * sum + bias[n]).
struct Epilogue {
    const float* scale2 = nullptr;  // one factor, or n of them where per_row
    bool per_row = false;
    const float* bias = nullptr;  // n values, or null
};

// An NVFP4 weight as the paths read it, in memory that its owner keeps for the call.
struct WeightView {
    std::int64_t n = 0;
    std::int64_t k = 0;
    int block_size = 16;

    std::int64_t tiles = 0;  // of 16 rows
    std::int64_t steps = 0;  // of 64 K

    // Tiled (layout.h) where can_tile(): `codes` holds scales too, and lies at a multiple of tiled_alignment. Otherwise
    // `codes` and `scales` are the canonical arrays, and panels are decoded from them.
    bool tiled = true;
    // No scale has a sign or is NaN, which is so in every usual checkpoint: the cheaper scale decode is right.
    bool plain_scales = true;
    const std::uint8_t* codes = nullptr;
    const std::uint8_t* scales = nullptr;
};

WeightView view_of(std::int64_t n, std::int64_t k, int block_size, bool tiled, bool plain_scales,
                   const std::uint8_t* codes, const std::uint8_t* scales);

inline constexpr std::size_t tiled_alignment = 64;  // bytes; the kernels load whole cache lines

// Every group of 16 K lies inside one block: block_size is a multiple of 16, or a row is one block.
bool can_tile(std::int64_t k, int block_size);
std::size_t tiled_size(std::int64_t n, std::int64_t k);  // bytes
bool has_plain_scales(const std::uint8_t* scales, std::int64_t count);

// Canonical to tiled and back, bit for bit. can_tile() holds.
void tile_weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales,
                 std::uint8_t* tiled);
void untile_weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* tiled, std::uint8_t* b,
                   std::uint8_t* scales);

// An immutable NVFP4 weight in the layout of the kernels; invertible bit for bit.
class Weight {
   public:
    // b: [n, k/2] and scales: [n, ceil(k/block_size)], both C-contiguous; copied, never kept.
    Weight(std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b, const std::uint8_t* scales);
    ~Weight();
    Weight(const Weight&) = delete;
    Weight& operator=(const Weight&) = delete;

    void canonical(std::uint8_t* b, std::uint8_t* scales) const;  // the bytes given at construction
    [[nodiscard]] std::size_t nbytes() const;

    [[nodiscard]] WeightView view() const;

   private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

// An instruction-set variant of the kernels. The list is ordered best first; the last one ("portable")
// runs anywhere.
struct Isa {
    std::string_view name;  // "avx512_bf16", "avx512", "avx2", "portable"
    bool (*runs_here)();    // cpuid and OS support
    void (*gemv)(const WeightView&, const Problem&, const Epilogue&, int threads);
    void (*gemm)(const WeightView&, const Problem&, const Epilogue&, int threads);
};
std::span<const Isa> all_isas();
const Isa& best_isa();                       // the first that runs here
const Isa* find_isa(std::string_view name);  // null for an unknown name

// The set whose kernels ran last in this process, as they noted it themselves; empty before the first call.
std::string_view last_isa_run();

// Largest M for which gemv is the faster of the two (measured; see docs/performance.md).
std::int64_t gemv_max_m(const Isa& isa, DType dtype);

// Threads that a call uses: FP4LINEAR_NUM_THREADS, else the cores this process may run on.
int default_threads();

// Runs body(begin, end) over pieces of [0, count) on up to `threads` threads; results may not depend on the partition.
// An exception of a body is rethrown here. Fork-safe.
void parallel_for(std::int64_t count, int threads, void (*body)(void* context, std::int64_t begin, std::int64_t end),
                  void* context);

}  // namespace fp4linear::cpu
