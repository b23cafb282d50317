#include "cpu/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "cpu/aligned_buffer.h"
#include "cpu/thread_pool.h"

namespace fp4linear::cpu {
namespace {

using Vector = std::uint64_t __attribute__((vector_size(16)));
constexpr std::int64_t chunk_bytes = 512;
constexpr std::int64_t prefetch_bytes = 4096;  // ahead of the reads, as the kernels do

// Sum of the words of a range of chunks; the sum keeps the reads alive.
std::uint64_t sweep(const std::uint8_t* data, std::int64_t begin, std::int64_t end) {
    Vector sums[4] = {};
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const std::uint8_t* at = data + chunk * chunk_bytes;
        for (int line = 0; line < chunk_bytes; line += 64) {
            // Past the end it is a hint that reads nothing.
            __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(at) + prefetch_bytes +
                                                             static_cast<std::uintptr_t>(line)));
            for (int i = 0; i < 4; ++i) {
                Vector value;
                std::memcpy(&value, at + line + 16 * i, sizeof(value));
                sums[i] += value;
            }
        }
    }
    const Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return sum[0] + sum[1];
}

}  // namespace

double read_bandwidth(std::size_t bytes, int threads, int repeats) {
    const auto chunks = std::max<std::int64_t>(1, static_cast<std::int64_t>(bytes / chunk_bytes));
    AlignedBuffer buffer(static_cast<std::size_t>(chunks * chunk_bytes));
    std::uint8_t* data = buffer.bytes();
    parallel_ranges(chunks, threads, [&](std::int64_t begin, std::int64_t end) {
        std::memset(data + begin * chunk_bytes, 1, static_cast<std::size_t>((end - begin) * chunk_bytes));
    });
    double best = 0.0;
    for (int repeat = 0; repeat < std::max(1, repeats); ++repeat) {
        const auto start = std::chrono::steady_clock::now();
        parallel_ranges(chunks, threads, [&](std::int64_t begin, std::int64_t end) {
            volatile std::uint64_t keep = sweep(data, begin, end);
            (void)keep;
        });
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(chunks * chunk_bytes) / std::max(seconds.count(), 1e-9));
    }
    return best;
}

}  // namespace fp4linear::cpu
