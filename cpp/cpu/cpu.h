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

    struct Impl;
    [[nodiscard]] const Impl& impl() const { return *impl_; }

   private:
    std::unique_ptr<Impl> impl_;
};

// An instruction-set variant of the kernels. The list is ordered best first; the last one ("portable")
// runs anywhere.
struct Isa {
    std::string_view name;  // "avx512_bf16", "avx512", "avx2", "portable"
    bool (*runs_here)();    // cpuid and OS support
    void (*gemv)(const Weight::Impl&, const Problem&, const Epilogue&, int threads);
    void (*gemm)(const Weight::Impl&, const Problem&, const Epilogue&, int threads);
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
