// One call of a layer whose weight and factors lie in somebody else's memory: what a framework passes that holds
// weights as its own arrays. Planned and run by the same functions as Linear's, so the results have the same bits.
#pragma once
#include <cstdint>
#include <optional>

#include "options.h"
#include "plan.h"
#include "problem.h"

namespace fp4linear {

enum class BorrowedForm : std::uint8_t {
    canonical,  // b [n, k/2] and scales [n, ceil(k/block_size)]; anywhere
    tiled,      // cpu/layout.h; on the CPU
    prepacked,  // cuda/prepacked.h; on a GPU
};
inline constexpr int borrowed_form_count = 3;
const char* name_of(BorrowedForm form);

// Units of 16 rows x 64 K in 576 bytes, [ceil(n/16), ceil(k/64)]: the shape that tiled and prepacked weights share.
inline constexpr int unit_rows = 16;
inline constexpr int unit_k = 64;
inline constexpr int unit_bytes = 576;

// Why a weight can't be held so; "" where it can. A prepacked one may hold no NaN scale, which this can't see.
std::string unmet_by_form(BorrowedForm form, std::int64_t k, int block_size);

struct BorrowedWeight {
    BorrowedForm form = BorrowedForm::canonical;
    const std::uint8_t* weight = nullptr;  // units, 64-byte aligned on the CPU and 16 on a GPU; or b
    const std::uint8_t* scales = nullptr;  // canonical: the scales
    const float* scale2 = nullptr;         // [n]
    const float* bias = nullptr;           // [n], or null
    std::optional<int> cuda_device;        // where all of these, x and y are; nothing: the CPU
};

// What Linear::forward does. Throws std::invalid_argument where no path can run.
std::optional<PathId> forward(const BorrowedWeight& weight, const Problem& problem, const Options& options,
                              void* stream = nullptr);

// Canonical to a form of units and back, bit for bit, in host memory. unmet_by_form() is "" for them.
void pack(BorrowedForm form, std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* b,
          const std::uint8_t* scales, std::uint8_t* units);
void unpack(BorrowedForm form, std::int64_t n, std::int64_t k, int block_size, const std::uint8_t* units,
            std::uint8_t* b, std::uint8_t* scales);

}  // namespace fp4linear
